// dQ, dK and dV of one block of keys of one key head: S is made once, dK and dV are added up in registers, dQ in memory.
// Rows of a tile are keys, columns are queries: S^T = K Q^T, dP^T = V dO^T.

constexpr int QUERIES = 64;  // of a step
constexpr int KEYS = WARPS * MT * 16;   // of a thread block, which the scale of dS in dQ is of
constexpr int HALVES = WARPS / 4, DQ_TILES = D / 8 / HALVES;  // warps that share 16 queries of dQ, and 8-channel tiles of each
#if INT8_DP
typedef i8 Operand;  // of dP: codes
constexpr float LEAST_SCALE = 1e-37f;  // of Q: that of rows behind the end is 0
constexpr int FLUSH = 8;  // steps after which sums of dK and dV lose what INT32 sums start from
static_assert(MT == 1, "of two warps, 16 keys each, one adds up dV and one dK");
#else
typedef u16 Operand;
#endif
enum : int { DP_BYTES = D * sizeof(Operand), FENCED = 4 };  // of a row; tiles of 8 channels of dK and dV between fences
constexpr float LEAST = 1e-30f;  // of a largest magnitude
constexpr float HIDDEN = -3e38f;  // a score: times the least scale of Q still far below, times 0 no NaN
constexpr u32 KT_AT = 0, K_AT = KT_AT + D * KEYS, V_AT = K_AT + (K_IN_REGISTERS ? 0 : KEYS * D), DS_AT = V_AT + KEYS * DP_BYTES, Q_AT = DS_AT + QUERIES * KEYS,
              DO_AT = Q_AT + QUERIES * D, QT_AT = DO_AT + QUERIES * DP_BYTES, DOT_AT = QT_AT + QUERIES * D, VALUES_AT = DOT_AT + QUERIES * D,
              LARGEST_AT = VALUES_AT + QUERIES * 16;

// q_int8 and k_int8: codes by their strides, v and d_o: 16 bits, or INT8_DP codes of (V - c) R and dO R. k_t (heads_k, D, blocks_k KEYS), q_t and do_t (heads, D, blocks_q 64):
// tokens interleaved. k_scale (heads_k, total_k). key_mask (batch, tokens_k), bytes, or null. do_scale (heads, blocks_q).
// values (heads, blocks_q, 64, 4): lse in base 2, delta, Q's scale, 0. dq_sums (heads, blocks_q, 64 D): FP32 in the order of
// registers, zeros before. dk, of K and no more of K R, and dv: 16 bits, by their strides.
// INT8_DP: v_scale, shaped as k_scale; values (heads, blocks_q, 2, 64, 2): lse in base 2 and Q's scale; delta and dO's scale, both times Q's.
KERNEL backward(const i8* q_int8, i64 q_batch, i64 q_head, i64 q_token, const i8* k_int8, i64 k_batch, i64 k_head, i64 k_token,
                const Operand* v, i64 v_batch, i64 v_head, i64 v_token, const Operand* d_o, i64 do_batch, i64 do_head, i64 do_token,
                const i8* k_t, const i8* q_t, const i8* do_t, const float* k_scale, const u8* key_mask, const float* do_scale,
                const float* values, float* dq_sums, u16* dk, i64 dk_batch, i64 dk_head, i64 dk_token, u16* dv, i64 dv_batch, i64 dv_head, i64 dv_token,
                const int* cu_seqlens_q, const int* cu_seqlens_k, i64 heads_k, i64 group, i64 tokens_q, i64 tokens_k, i64 total_k,
                i64 blocks_q, i64 blocks_k, i64 grid, i64 lower, i64 upper, float scale
#if INT8_DP
                , const float* v_scale
#endif
                ) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Place place(blockIdx.x % (int)grid, blockIdx.x / (int)grid, cu_seqlens_k, (int)tokens_k, (int)heads_k, KEYS);
  const int owner = place.owner, block = place.number, batch = place.batch, head_k = place.head;
  const Sequence queries(cu_seqlens_q, batch, tokens_q), keys(cu_seqlens_k, batch, tokens_k);
  const int first_k = block * KEYS;
  if (first_k >= keys.length) return;
  const i64 z_k = cu_seqlens_k ? head_k : owner;
  const int padded_k = keys.padded(cu_seqlens_k, batch, KEYS), padded_q = queries.padded(cu_seqlens_q, batch, QUERIES);
  const int shift = cu_seqlens_q ? keys.length - queries.length : 0;
  const int low = (int)lower + shift, high = (int)upper + shift;  // key - query is within
  const int left_k = keys.length - first_k;

  // blocks of queries that see a key of these, of each head of the group
  const int begin = max(first_k - high, 0) / QUERIES;
  const int last = min(queries.length, first_k + min(KEYS, left_k) - low);
  const int blocks = max((last + QUERIES - 1) / QUERIES - begin, 0);
  const int steps = last > 0 ? blocks * (int)group : 0;
  // a head's thread blocks begin at different queries, and so add to different rows of dQ
  const int offset = (int)((i64)block * steps / ((keys.length + KEYS - 1) / KEYS));

  const u32 base = shared_base();
  // of the next step: its block of queries and its head, by which values by token and padded blocks are counted too
  int step_block = begin + (steps ? offset % blocks : 0), step_head = head_k * (int)group + (steps ? offset / blocks : 0);
  const int end = begin + blocks, last_head = (head_k + 1) * (int)group, batch_heads = cu_seqlens_q ? 0 : batch * (int)(heads_k * group);
  auto advance = [&]() {
    if (++step_block < end) return;
    step_block = begin;
    if (++step_head == last_head) step_head = head_k * (int)group;
  };
  auto block_of = [&]() { return (batch_heads + step_head) * (int)blocks_q + padded_q + step_block; };
  auto fetch_rows = [&]() {
    const int first = step_block * QUERIES, left = queries.length - first;
    copy_tile<QUERIES, D>(base + Q_AT, q_int8 + offset_of(q_batch, q_head, q_token, batch, step_head, queries.start + first), q_token, left);
    copy_tile<QUERIES, DP_BYTES>(base + DO_AT, d_o + offset_of(do_batch, do_head, do_token, batch, step_head, queries.start + first), do_token * (int)sizeof(Operand), left);
    copy_flat<QUERIES * 16>(base + VALUES_AT, values + (i64)block_of() * (QUERIES * 4));
    commit_copies();
  };
  auto fetch_columns = [&]() {
    const i64 pitch = blocks_q * QUERIES, from = (batch_heads + step_head) * (D * pitch) + (padded_q + step_block) * QUERIES;
    copy_tile<D, QUERIES>(base + QT_AT, q_t + from, pitch, D);
    copy_tile<D, QUERIES>(base + DOT_AT, do_t + from, pitch, D);
    commit_copies();
  };
  const i64 pitch_k = blocks_k * KEYS;
  copy_tile<D, KEYS>(base + KT_AT, k_t + z_k * D * pitch_k + (i64)padded_k * KEYS + first_k, pitch_k, D);
  k_int8 += offset_of(k_batch, k_head, k_token, batch, head_k, keys.start + first_k);
#if !K_IN_REGISTERS
  copy_tile<KEYS, D, true>(base + K_AT, k_int8, k_token, left_k);
#endif
  copy_tile<KEYS, DP_BYTES, true>(base + V_AT, v + offset_of(v_batch, v_head, v_token, batch, head_k, keys.start + first_k), v_token * (int)sizeof(Operand), left_k,
                                 key_mask ? key_mask + (i64)batch * tokens_k + first_k : nullptr);  // what is hidden may be NaN
  if (steps) fetch_rows(); else commit_copies();
  if (threadIdx.x < 2 * QUERIES) store_shared(base + LARGEST_AT + threadIdx.x * 4, 0);

  int start[4];
  four_opaque(start, MAGIC);
  float ks[MT][2], ks_start[MT][2], acc_k[MT][D / 8][4], acc_v[MT][D / 8][4];
#if INT8_DP
  float vs[MT][2], vs_start[MT][2];
  float lacking_k[MT][2], lacking_v[MT][2];  // of sums that start from MAGIC, what acc_k and acc_v have too much
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) lacking_k[i][h] = lacking_v[i][h] = 0;
#endif
  const int row0 = warp * MT * 16, token0 = row0 + (g & 1 ? g + 7 : g);  // of a tile a thread has keys token0 and the next
  UNROLL for (int i = 0; i < MT; i++) {
    UNROLL for (int h = 0; h < 2; h++) {
      const int key = first_k + token0 + i * 16 + h;
      const bool counts = key < keys.length && (!key_mask || key_mask[(i64)batch * tokens_k + key]);
      ks[i][h] = counts ? k_scale[z_k * total_k + keys.start + key] * (scale * LOG2_E) : 0.0f;
      ks_start[i][h] = counts ? -MAGIC_F * ks[i][h] : HIDDEN;
#if INT8_DP
      vs[i][h] = counts ? rounded_down(v_scale[z_k * total_k + keys.start + key]) : 0.0f;
      vs_start[i][h] = -MAGIC_F * vs[i][h];
#endif
    }
    UNROLL for (int n = 0; n < D / 8; n++) UNROLL for (int r = 0; r < 4; r++) acc_k[i][n][r] = acc_v[i][n][r] = 0;
  }
#if K_IN_REGISTERS
  u32 k_rows[MT][D / 32][4];
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int k = 0; k < D / 32; k++) UNROLL for (int c = 0; c < 2; c++) {
    const int key = token0 + i * 16 + h;
    k_rows[i][k][h + 2 * c] = key < left_k ? *(const u32*)(k_int8 + key * k_token + t * 4 + k * 32 + c * 16) : 0;
  }
#endif
  // of operands: columns take four chunks of 8 rows, rows two chunks of 16
  const u32 q_lane = base + Q_AT + swizzled<D>(lane & 7, lane >> 3), do_lane = base + DO_AT + swizzled<D * 2>(lane & 7, lane >> 3);
  const u32 qt_lane = base + QT_AT + swizzled<QUERIES>(lane & 7, lane >> 3), dot_lane = base + DOT_AT + swizzled<QUERIES>(lane & 7, lane >> 3);
  const u32 kt_lane = base + KT_AT + swizzled<KEYS>(lane & 7, lane >> 3);
  const u32 k_lane = base + K_AT + swizzled<D>(row0 + (lane & 15), lane >> 4), v_lane = base + V_AT + swizzled<DP_BYTES>(row0 + (lane & 15), lane >> 4);
  const int dq_tile = warp & 3, half = warp >> 2;  // of dQ a warp has 16 queries and one of HALVES of the channels
  const u32 ds_lane = base + DS_AT + swizzled<QUERIES * 2>((lane >> 4) * 8 + (lane & 7), dq_tile * 2 + ((lane >> 3) & 1));
  const u32 ds_store = base + DS_AT + (warp * MT * 8 + g) * 128 + t * 4;
#if INT8_DP  // of two warps one adds up dV and one dK, of the keys of both: acc_v of its own, acc_k of its partner's
  constexpr u32 PARTNER_AT = LARGEST_AT + QUERIES * 8, CODES = 1024, SCALES = 64;  // bytes that a warp hands over
  const bool of_k = warp & 1;
  const u32 own_codes = base + PARTNER_AT + warp * CODES + lane * 16, partner_codes = own_codes + (of_k ? -CODES : CODES);
  const u32 own_scales = base + PARTNER_AT + WARPS * CODES + warp * SCALES + g * 8, partner_scales = own_scales + (of_k ? -SCALES : SCALES);

  wait_for_copies<0>();
  __syncthreads();
  if (steps) fetch_columns();
#endif
#pragma unroll 1
  for (int j = 0; j < steps; j++) {
#if !INT8_DP
    wait_for_copies<0>();
    __syncthreads();  // rows of this step are here; columns, dS and maxima of the last one are free
    fetch_columns();
#endif
    const u32 largest_at = base + LARGEST_AT + (j & 1) * QUERIES * 4;
#if !INT8_DP
    if (j && threadIdx.x < QUERIES) store_shared(base + LARGEST_AT + ((j + 1) & 1) * QUERIES * 4 + threadIdx.x * 4, 0);
#endif
    const int first_q = step_block * QUERIES;
    const int dq_block = block_of();

    int s[MT][8][4];  // (1) [GEMM] S^T = K Q^T
    UNROLL for (int c = 0; c < D / 64; c++) {
      u32 a[MT][2][4];
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int k = 0; k < 2; k++) {
#if K_IN_REGISTERS
        UNROLL for (int r = 0; r < 4; r++) a[i][k][r] = k_rows[i][2 * c + k][r];
#else
        load_matrices(a[i][k], (k_lane ^ ((2 * c + k) << 5)) + i * 16 * D);
#endif
      }
      UNROLL for (int n = 0; n < 8; n += PAIR) {
        u32 b[PAIR][4];
        UNROLL for (int e = 0; e < PAIR; e++) load_matrices(b[e], (q_lane ^ (c << 6)) + (n + e) * 8 * D);
        UNROLL for (int e = 0; e < PAIR; e++) UNROLL for (int i = 0; i < MT; i++) mma(start, c == 0, s[i][n + e], a[i][0], b[e][0], b[e][1]);  // S^T = K Q^T, 32 channels
        UNROLL for (int e = 0; e < PAIR; e++) UNROLL for (int i = 0; i < MT; i++) mma(s[i][n + e], a[i][1], b[e][2], b[e][3]);  // S^T += K Q^T, 32 more
      }
    }
    float p[MT][8][4], ds[MT][8][4];
#if INT8_DP
    UNROLL for (int n = 0; n < 8; n++) {
      float c[4];  // of queries 8n + 2t and the next: lse, Q's scale
      load_shared4(c, base + VALUES_AT + n * 64 + t * 16);
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++)
        p[i][n][r] = exp2_of((as_float(s[i][n][r]) * ks[i][r >> 1] + ks_start[i][r >> 1]) * c[(r & 1) * 2 + 1] - c[(r & 1) * 2]);  // (3) P = exp2(S - lse)
    }
#else
    UNROLL for (int n = 0; n < 8; n++) {
      float c0[4], c1[4];  // of queries 8n + 2t and the next
      load_shared4(c0, base + VALUES_AT + n * 128 + t * 32);
      load_shared4(c1, base + VALUES_AT + n * 128 + t * 32 + 16);
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++) {
        const float y = as_float(s[i][n][r]) * ks[i][r >> 1] + ks_start[i][r >> 1];
        p[i][n][r] = exp2_of(y * (r & 1 ? c1[2] : c0[2]) - (r & 1 ? c1[0] : c0[0]));  // (3) P = exp2(S - lse)
        ds[i][n][r] = -(r & 1 ? c1[1] : c0[1]);
      }
    }
    UNROLL for (int c = 0; c < D / 32; c++) {  // (2) [GEMM] dP^T - delta = V dO^T - delta
      u32 a[MT][2][4];
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int k = 0; k < 2; k++) load_matrices(a[i][k], (v_lane ^ (((2 * c + k) & 3) << 5)) + ((2 * c + k) >> 2) * 128 + i * 16 * D * 2);
      UNROLL for (int n = 0; n < 8; n += PAIR) {
        u32 b[PAIR][4];
        UNROLL for (int e = 0; e < PAIR; e++) load_matrices(b[e], (do_lane ^ ((c & 1) << 6)) + (c >> 1) * 128 + (n + e) * 8 * D * 2);
        UNROLL for (int e = 0; e < PAIR; e++) UNROLL for (int i = 0; i < MT; i++) mma_16bit(ds[i][n + e], a[i][0], b[e][0], b[e][1]);  // dP^T - delta += V dO^T, 16 channels
        UNROLL for (int e = 0; e < PAIR; e++) UNROLL for (int i = 0; i < MT; i++) mma_16bit(ds[i][n + e], a[i][1], b[e][2], b[e][3]);  // dP^T - delta += V dO^T, 16 more
      }
    }
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int n = 0; n < 8; n++) UNROLL for (int r = 0; r < 4; r++) ds[i][n][r] *= p[i][n][r];  // (4) dS = P (dP - delta)
#endif
    if (first_k + KEYS - 1 - first_q > high || first_k - (first_q + QUERIES - 1) < low) {  // the band cuts the tile
      const int above = first_k + token0 - (first_q + t * 2) - low;  // of key - query over the least, of the thread's first pair
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int n = 0; n < 8; n++) UNROLL for (int r = 0; r < 4; r++)
        if ((u32)(above + i * 16 + (r >> 1) - n * 8 - (r & 1)) > (u32)(high - low)) {
          p[i][n][r] = 0;
#if !INT8_DP
          ds[i][n][r] = 0;
#endif
        }
    }
    float p_scale[MT][2], ds_scale[MT][2];
    u32 p8[MT][2][4], ds8[MT][2][4];
    UNROLL for (int i = 0; i < MT; i++) {  // codes of P, one scale a key
      float top[2] = {LEAST, LEAST};
      UNROLL for (int n = 0; n < 8; n++) UNROLL for (int r = 0; r < 4; r++) top[r >> 1] = max_nan(top[r >> 1], p[i][n][r]);
      UNROLL for (int h = 0; h < 2; h++) {
        const float y = largest_over_row(top[h]);
        p_scale[i][h] = y;
        top[h] = 127.0f * reciprocal(y);
      }
      UNROLL for (int k = 0; k < 2; k++) UNROLL for (int r = 0; r < 4; r++) {
        const int n = 4 * k + (r >> 1) * 2, h = (r & 1) * 2;
        const float z = top[r & 1];
        p8[i][k][r] = pack(p[i][n][h] * z + MAGIC_F, p[i][n][h + 1] * z + MAGIC_F, p[i][n + 1][h] * z + MAGIC_F, p[i][n + 1][h + 1] * z + MAGIC_F);
      }
    }
#if INT8_DP
    int x[MT][8][4];  // (2) [GEMM] dP^T = V dO^T, of codes
    fence();
    UNROLL for (int c = 0; c < D / 64; c++) {
      u32 a[MT][2][4];
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int k = 0; k < 2; k++) load_matrices(a[i][k], (v_lane ^ ((2 * c + k) << 5)) + i * 16 * D);
      UNROLL for (int n = 0; n < 8; n += PAIR) {
        u32 b[PAIR][4];
        UNROLL for (int e = 0; e < PAIR; e++) load_matrices(b[e], (q_lane ^ (c << 6)) + (DO_AT - Q_AT) + (n + e) * 8 * D);
        UNROLL for (int e = 0; e < PAIR; e++) UNROLL for (int i = 0; i < MT; i++) mma(start, c == 0, x[i][n + e], a[i][0], b[e][0], b[e][1]);  // dP^T = V dO^T, 32 channels
        UNROLL for (int e = 0; e < PAIR; e++) UNROLL for (int i = 0; i < MT; i++) mma(x[i][n + e], a[i][1], b[e][2], b[e][3]);  // dP^T += V dO^T, 32 more
      }
    }
    UNROLL for (int n = 0; n < 8; n++) {
      float c[4];  // of queries 8n + 2t and the next: delta, dO's scale, both times Q's
      load_shared4(c, base + VALUES_AT + QUERIES * 8 + n * 64 + t * 16);
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++)  // (4) dS = P (dP - delta), times Q's scale
        ds[i][n][r] = ((as_float(x[i][n][r]) * vs[i][r >> 1] + vs_start[i][r >> 1]) * c[(r & 1) * 2 + 1] - c[(r & 1) * 2]) * p[i][n][r];
    }
#endif
    float column[16];  // the largest |dS| of queries 8n + 2t + b, times K's scale
    UNROLL for (int i = 0; i < MT; i++) {  // codes of dS times Q's scale, one scale a key
#if INT8_DP
      float top[2] = {LEAST, LEAST};
      UNROLL for (int n = 0; n < 8; n++) UNROLL for (int r = 0; r < 4; r++) top[r >> 1] = max_nan(top[r >> 1], fabsf(ds[i][n][r]));
#else
      float top[2] = {LEAST, LEAST}, qs[8][2];
      UNROLL for (int n = 0; n < 8; n++) {
        qs[n][0] = load_shared(base + VALUES_AT + n * 128 + t * 32 + 8);
        qs[n][1] = load_shared(base + VALUES_AT + n * 128 + t * 32 + 24);
        UNROLL for (int r = 0; r < 4; r++) top[r >> 1] = max_nan(top[r >> 1], fabsf(ds[i][n][r] * qs[n][r & 1]));
      }
#endif
      UNROLL for (int h = 0; h < 2; h++) {
        const float y = largest_over_row(top[h]);
        ds_scale[i][h] = y * (1 / 127.0f);
        top[h] = 127.0f * reciprocal(y);
      }
      UNROLL for (int k = 0; k < 2; k++) UNROLL for (int r = 0; r < 4; r++) {
        const int n = 4 * k + (r >> 1) * 2, h = (r & 1) * 2;
        const float z = top[r & 1];
#if INT8_DP
        ds8[i][k][r] = pack(ds[i][n][h] * z + MAGIC_F, ds[i][n][h + 1] * z + MAGIC_F, ds[i][n + 1][h] * z + MAGIC_F, ds[i][n + 1][h + 1] * z + MAGIC_F);
#else
        ds8[i][k][r] = pack(ds[i][n][h] * qs[n][0] * z + MAGIC_F, ds[i][n][h + 1] * qs[n][1] * z + MAGIC_F,
                            ds[i][n + 1][h] * qs[n + 1][0] * z + MAGIC_F, ds[i][n + 1][h + 1] * qs[n + 1][1] * z + MAGIC_F);
#endif
      }
      UNROLL for (int n = 0; n < 8; n++) {
        UNROLL for (int r = 0; r < 4; r++) ds[i][n][r] *= ks[i][r >> 1];
        UNROLL for (int b = 0; b < 2; b++) {
          const float y = max_nan(fabsf(ds[i][n][b]), fabsf(ds[i][n][b + 2]));
          column[n * 2 + b] = i ? max_nan(column[n * 2 + b], y) : y;
        }
      }
    }
    // sixteen maxima over the eight lanes of a column: each lane ends with two
    fold<8, 16>(column, lane);
    fold<4, 8>(column, lane);
    fold<2, 4>(column, lane);
    const int mine = ((lane & 16) >> 2) + ((lane & 8) >> 2) + ((lane & 4) >> 2);
    max_shared(largest_at + (mine * 8 + t * 2) * 4, column[0]);
    max_shared(largest_at + (mine * 8 + t * 2 + 1) * 4, column[1]);
    const float do8_scale = do_scale[dq_block] * (1 / 127.0f);
#if INT8_DP
    float q_inverse[2];
    UNROLL for (int h = 0; h < 2; h++) q_inverse[h] = reciprocal(max_nan(load_shared(base + VALUES_AT + (dq_tile * 16 + h * 8 + g) * 8 + 4), LEAST_SCALE));
    UNROLL for (int k = 0; k < 2; k++) {
      u32 given[4];
      UNROLL for (int r = 0; r < 4; r++) {
        given[r] = of_k ? p8[0][k][r] : ds8[0][k][r];
        p8[0][k][r] = of_k ? ds8[0][k][r] : p8[0][k][r];
      }
      store_shared4(own_codes + k * 512, given);
    }
    UNROLL for (int h = 0; h < 2; h++) {
      p_scale[0][h] *= do8_scale;
      if (t == 0) store_shared(own_scales + h * 4, as_word(of_k ? p_scale[0][h] : ds_scale[0][h]));
      p_scale[0][h] = of_k ? ds_scale[0][h] : p_scale[0][h];
    }
    wait_for_copies<0>();
#endif
    __syncthreads();  // maxima are whole; rows of this step are free (INT8_DP: columns are here; dS and maxima of the last one are free)
#if INT8_DP
    if (threadIdx.x < QUERIES) store_shared(base + LARGEST_AT + ((j + 1) & 1) * QUERIES * 4 + threadIdx.x * 4, 0);
#endif
    advance();
    if (j + 1 < steps) fetch_rows(); else commit_copies();
    UNROLL for (int n = 0; n < 8; n++) {
      float z[2];
      load_shared2(z, largest_at + n * 32 + t * 8);
      UNROLL for (int b = 0; b < 2; b++) z[b] = 127.0f * reciprocal(max_nan(z[b], LEAST));
      UNROLL for (int i = 0; i < MT; i++)
        store_shared(ds_store + i * 8 * 128 + ((n ^ g) << 4),
                     pack(ds[i][n][0] * z[0] + MAGIC_F, ds[i][n][2] * z[0] + MAGIC_F, ds[i][n][1] * z[1] + MAGIC_F, ds[i][n][3] * z[1] + MAGIC_F));
    }
#if INT8_DP
    UNROLL for (int k = 0; k < 2; k++) load_words4(ds8[0][k], partner_codes + k * 512);
    load_shared2(ds_scale[0], partner_scales);
    const u32 column_lane = of_k ? qt_lane : dot_lane;
#else
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) p_scale[i][h] *= do8_scale;
    wait_for_copies<1>();
    __syncthreads();  // dS and columns are here
#endif
    UNROLL for (int n = 0; n < D / 8; n++) {
#if INT8_DP
      u32 b[4], *d = b;
      load_matrices(b, column_lane + n * 8 * QUERIES);
#else
      u32 b[4], d[4];
      load_matrices(b, dot_lane + n * 8 * QUERIES);
      load_matrices(d, qt_lane + n * 8 * QUERIES);
#endif
      UNROLL for (int i = 0; i < MT; i++) {
        int x[4], y[4];
        if (n % FENCED == 0) fence();
        mma(start, true, x, p8[i][0], b[0], b[1]);  // (5) [GEMM] dV += P^T dO, 32 queries
        mma(start, true, y, ds8[i][0], d[0], d[1]);  // (6) [GEMM] dK += dS^T Q, 32 queries
        mma(x, p8[i][1], b[2], b[3]);  // dV += P^T dO, 32 more queries
        mma(y, ds8[i][1], d[2], d[3]);  // dK += dS^T Q, 32 more queries
        UNROLL for (int r = 0; r < 4; r++) {
#if INT8_DP
          acc_v[i][n][r] += as_float(x[r]) * p_scale[i][r >> 1];
          acc_k[i][n][r] += as_float(y[r]) * ds_scale[i][r >> 1];
#else
          acc_v[i][n][r] += (as_float(x[r]) - MAGIC_F) * p_scale[i][r >> 1];
          acc_k[i][n][r] += (as_float(y[r]) - MAGIC_F) * ds_scale[i][r >> 1];
#endif
        }
      }
    }
#if INT8_DP  // what started from MAGIC is taken off every so many steps: until then sums lack a few units of their codes
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
      lacking_v[i][h] += MAGIC_F * p_scale[i][h];
      lacking_k[i][h] += MAGIC_F * ds_scale[i][h];
    }
    if (j % FLUSH == FLUSH - 1 || j + 1 == steps) UNROLL for (int i = 0; i < MT; i++) {
      UNROLL for (int n = 0; n < D / 8; n++) UNROLL for (int r = 0; r < 4; r++) {
        acc_v[i][n][r] -= lacking_v[i][r >> 1];
        acc_k[i][n][r] -= lacking_k[i][r >> 1];
      }
      UNROLL for (int h = 0; h < 2; h++) lacking_v[i][h] = lacking_k[i][h] = 0;
    }
    wait_for_copies<0>();
    __syncthreads();  // dS and rows of the next step are here; columns are free
    if (j + 1 < steps) fetch_columns();
#endif
    u32 a[KEYS / 32][4];
    UNROLL for (int k = 0; k < KEYS / 32; k++) load_matrices_transposed(a[k], ds_lane + k * 16 * 128);
    float w[2], w_start[2];
    UNROLL for (int h = 0; h < 2; h++) {  // without its last two bits, so that 1.5 2^23 of it is exact and sums of 0 are 0
      float y = load_shared(largest_at + (dq_tile * 16 + h * 8 + g) * 4) * (1 / 127.0f / LOG2_E);
#if INT8_DP
      y *= q_inverse[h];
#endif
      w[h] = rounded_down(y);
      w_start[h] = -MAGIC_F * w[h];
    }
    float* to = dq_sums + (i64)dq_block * (QUERIES * D) + (dq_tile * (D / 8) + half * DQ_TILES) * 128 + lane * (ADDS_FOUR ? 4 : 1);
    UNROLL for (int n = 0; n < DQ_TILES; n += PAIR) {
      int x[PAIR][4];  // (7) [GEMM] dQ += dS K
      UNROLL for (int c = 0; c < KEYS / 64; c++) {
        u32 b[PAIR][4];
        UNROLL for (int e = 0; e < PAIR; e++) load_matrices(b[e], (kt_lane ^ (c << 6)) + (half * DQ_TILES + n + e) * 8 * KEYS);
        UNROLL for (int e = 0; e < PAIR; e++) mma(start, c == 0, x[e], a[2 * c], b[e][0], b[e][1]);  // dQ += dS K, 32 keys
        UNROLL for (int e = 0; e < PAIR; e++) mma(x[e], a[2 * c + 1], b[e][2], b[e][3]);  // dQ += dS K, 32 more
      }
#if ADDS_FOUR
      UNROLL for (int h = 0; h < 2; h++) add_global4(to + (n + h) * 128, as_float(x[0][2 * h]) * w[h] + w_start[h], as_float(x[0][2 * h + 1]) * w[h] + w_start[h],
                                                     as_float(x[1][2 * h]) * w[h] + w_start[h], as_float(x[1][2 * h + 1]) * w[h] + w_start[h]);
#else
      UNROLL for (int e = 0; e < PAIR; e++) UNROLL for (int r = 0; r < 4; r++) add_global(to + (n + e) * 128 + r * 32, as_float(x[e][r]) * w[r >> 1] + w_start[r >> 1]);
#endif
    }
  }
  wait_for_copies<0>();
  dk += offset_of(dk_batch, dk_head, dk_token, batch, head_k, keys.start + first_k);
  dv += offset_of(dv_batch, dv_head, dv_token, batch, head_k, keys.start + first_k);
#if INT8_DP  // without a branch: ptxas does not know that of_k is a warp's
  u16* out = of_k ? dk : dv;
  const i64 pitch = of_k ? dk_token : dv_token;
  UNROLL for (int other = 0; other < 2; other++) UNROLL for (int h = 0; h < 2; h++) {
    const int key = (other ? token0 ^ 16 : token0) + h;
    float x[D / 4], y[D / 4];
    UNROLL for (int i = 0; i < D / 4; i++) x[i] = y[i] = other ? acc_k[0][i / 2][2 * h + i % 2] : acc_v[0][i / 2][2 * h + i % 2];
    turn_back(y, scale, t);
    UNROLL for (int i = 0; i < D / 4; i++) x[i] = of_k ? y[i] : x[i];
    store_row(out + key * pitch, key < left_k, x, t);
  }
#else
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
    const int key = token0 + i * 16 + h;
    float x[D / 4];
    UNROLL for (int c = 0; c < D / 4; c++) x[c] = acc_v[i][c / 2][2 * h + c % 2];
    store_row(dv + key * dv_token, key < left_k, x, t);
    UNROLL for (int c = 0; c < D / 4; c++) x[c] = acc_k[i][c / 2][2 * h + c % 2];
    turn_back(x, scale, t);
    store_row(dk + key * dk_token, key < left_k, x, t);
  }
#endif
}
