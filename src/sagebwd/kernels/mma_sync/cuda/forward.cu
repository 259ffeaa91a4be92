// O and lse of one block of queries of one head, over key blocks of 128: S = Q K^T and O = P V of INT8 codes.
// SPLIT warps share rows: of two each has half of every block's keys in S and half of the channels in P V, and hands its
// codes of P to the other. Twice as many rows fit a warp's registers, and its products read half as much a row.
// FIRST keys of a sequence (0 or 16) are apart from the blocks.

constexpr int KEYS = 128;
constexpr int LEVELS = 254;  // of P: codes 0 to 254, less 128
constexpr float LOG2_LEVELS = 7.9886846867721655f;
constexpr u32 TWO_1152 = 0x64806480;  // FP16: a number added to 1024 + 128 is rounded, its low byte is the code
constexpr float SLACK = 8;  // log2 of how far a row's largest score may be above what its sums are in units of
constexpr float LOWEST = -3e38f;  // m where nothing is seen: less of it is no NaN
constexpr u32 K_AT = 0, V_AT = KEYS * D, K_SCALES_AT = V_AT + D * KEYS, V_SCALES_AT = K_SCALES_AT + KEYS * 8, STAGE = V_SCALES_AT + D * 8;
constexpr int SCALES = KEYS * 8 + D * 8, TILE = D * KEYS + SCALES;  // bytes, which lie together in memory
constexpr u32 TOPS_AT = STAGES * STAGE;
constexpr int ROWS = WARPS * MT * 16;  // of all warps
constexpr int QUERIES = ROWS / SPLIT, OWN_KEYS = KEYS / SPLIT, OWN_D = D / SPLIT;  // of a thread block, of a warp
constexpr int AT_ONCE = MT > SPLIT ? 1 : PAIR;  // tiles of 8 columns at a time: products of two tiles of rows do not wait for one another either
constexpr u32 CODES_AT = TOPS_AT + ROWS * 4, CODES = MT * OWN_KEYS * 16;  // what two warps exchange, CODES bytes each
static_assert(SPLIT == 1 || SPLIT == 2, "warps share rows in pairs");

// q_int8 and k_int8: codes by their strides. q_scale (heads, total_q), k_scale (heads_k, total_k).
// values (heads_k, blocks_k, TILE) bytes: codes of V less its mean, (D, 128), tokens interleaved; then two keys' scales and
// what a sum that starts from MAGIC lacks, times them, (64, 4) FP32: of a key that nobody sees, or that is apart, 0 and
// -inf; then the same of two channels of V, (D / 2, 4). v_mean (batch, heads_k, D) or null.
// first_values, V of the keys that are apart, less the mean: (batch, heads_k, D, 16) of 16 bits, tokens interleaved. first_numbers (batch, FIRST): which they are, keys.length where there are fewer, or null.
KERNEL forward(const i8* q_int8, i64 q_batch, i64 q_head, i64 q_token, const float* q_scale, const i8* k_int8, i64 k_batch, i64 k_head,
               i64 k_token, const float* k_scale, const u8* values, const float* v_mean, const void* first_values, const int* first_numbers,
               u16* o, i64 o_batch, i64 o_head, i64 o_token, float* lse, const int* cu_seqlens_q, const int* cu_seqlens_k, i64 heads, i64 group, i64 tokens_q, i64 tokens_k, i64 total_q,
               i64 total_k, i64 blocks_k, i64 grid, i64 lower, i64 upper, float scale) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  // the last queries see the most keys: start them first
  const Place place((int)grid - 1 - (int)(blockIdx.x % (int)grid), blockIdx.x / (int)grid, cu_seqlens_q, (int)tokens_q, (int)heads, QUERIES);
  const int batch_head = place.owner, batch = place.batch, head = place.head, head_k = head / (int)group;
  const Sequence queries(cu_seqlens_q, batch, tokens_q), keys(cu_seqlens_k, batch, tokens_k);
  const int first_q = place.number * QUERIES;
  if (first_q >= queries.length) return;
  const int heads_k = (int)heads / (int)group, owner = batch * heads_k + head_k;
  const i64 z_q = cu_seqlens_q ? head : batch_head, z_k = cu_seqlens_k ? head_k : owner;
  const int padded_k = keys.padded(cu_seqlens_k, batch, KEYS);
  // key - query is within [low, high]
  const int shift = cu_seqlens_q ? keys.length - queries.length : 0;
  const int low = (int)lower + shift, high = (int)upper + shift;
  const int part = warp % SPLIT, first_d = part * OWN_D, row0 = first_q + warp / SPLIT * MT * 16;
  const float scale_2 = scale * LOG2_E;

  const u32 base = shared_base();
  k_int8 += offset_of(k_batch, k_head, k_token, batch, head_k, keys.start);
  int begin = max(first_q + low, 0) / KEYS, end = min(keys.length, first_q + QUERIES + high);
  end = end > 0 ? (end + KEYS - 1) / KEYS : 0;
  // a thread copies 16 bytes of every K_TURN-th row of K and V_TURN-th of V, from here in the next block
  constexpr int K_TURN = THREADS / (D / 16), V_TURN = THREADS / (KEYS / 16);
  static_assert(K_TURN % 8 == 0 && V_TURN % 8 == 0 && SCALES <= THREADS * 16, "the swizzle is every turn's, scales are copied in one");
  const int thread = threadIdx.x, k_row = thread / (D / 16);
  const u32 k_to = base + K_AT + swizzled<D>(k_row, thread % (D / 16)), v_to = base + V_AT + swizzled<KEYS>(thread / 8, thread % 8);
  const i8* k_from = k_int8 + (begin * KEYS + k_row) * k_token + thread % (D / 16) * 16;
  const u8* v_from = values + (z_k * blocks_k + padded_k + begin) * TILE + thread * 16;
  auto fetch = [&](int block, u32 further) {
    const int left = keys.length - block * KEYS - k_row;
    const i8* row = k_from;
    UNROLL for (int i = 0; i < KEYS / K_TURN; i++, row += K_TURN * k_token) copy16(k_to + further + i * K_TURN * D, row, i * K_TURN < left);
    UNROLL for (int i = 0; i < D / V_TURN; i++) copy16(v_to + further + i * V_TURN * KEYS, v_from + i * V_TURN * KEYS, true);
    if (thread < SCALES / 16) copy16(base + further + K_SCALES_AT + thread * 16, v_from + D * KEYS, true);
    k_from += KEYS * k_token;
    v_from += TILE;
  };
  UNROLL for (int i = 0; i < STAGES - 1; i++) {
    if (begin + i < end) fetch(begin + i, i * STAGE);
    commit_copies();
  }

  u32 q[MT][D / 32][4];
  float qs[MT][2], m[MT][2], l[MT][2], acc[MT][OWN_D / 8][4];
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
    const int row = row0 + i * 16 + h * 8 + g;
    const bool there = row < queries.length;
    const i8* at = q_int8 + offset_of(q_batch, q_head, q_token, batch, head, queries.start + (there ? row : 0)) + t * 4;
    UNROLL for (int k = 0; k < D / 32; k++) UNROLL for (int c = 0; c < 2; c++) q[i][k][h + 2 * c] = *(const u32*)(at + k * 32 + c * 16);
    qs[i][h] = there ? max_nan(q_scale[z_q * total_q + queries.start + row] * scale_2, 1e-37f) : 1.0f;
    m[i][h] = LOWEST;
    l[i][h] = 0;
    UNROLL for (int n = 0; n < OWN_D / 8; n++) acc[i][n][2 * h] = acc[i][n][2 * h + 1] = 0;
  }
  const u32 k_lane = K_AT + part * OWN_KEYS * D + swizzled<D>(lane & 7, lane >> 3), v_lane = (V_AT + first_d * KEYS + swizzled<KEYS>(lane & 7, lane >> 3)) ^ (part << 6);
  int start[4];
  four_opaque(start, MAGIC);
  u32 at_slot = 0, next_slot = (STAGES - 1) * STAGE;
#pragma unroll 1
  for (int block = begin; block < end; block++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    if (block + STAGES - 1 < end) fetch(block + STAGES - 1, next_slot);
    commit_copies();
    const u32 at = base + at_slot;
    next_slot = at_slot;
    at_slot = at_slot == (STAGES - 1) * STAGE ? 0 : at_slot + STAGE;

    int s[MT][OWN_KEYS / 8][4];  // (1) [GEMM] S = Q K^T
    UNROLL for (int n = 0; n < OWN_KEYS / 8; n += AT_ONCE) UNROLL for (int c = 0; c < D / 64; c++) {
      u32 b[AT_ONCE][4];
      UNROLL for (int e = 0; e < AT_ONCE; e++) load_matrices(b[e], at + ((k_lane ^ (c << 6)) + (n + e) * 8 * D));
      UNROLL for (int e = 0; e < AT_ONCE; e++) UNROLL for (int i = 0; i < MT; i++) mma(start, c == 0, s[i][n + e], q[i][2 * c], b[e][0], b[e][1]);  // S = Q K^T, 32 channels
      UNROLL for (int e = 0; e < AT_ONCE; e++) UNROLL for (int i = 0; i < MT; i++) mma(s[i][n + e], q[i][2 * c + 1], b[e][2], b[e][3]);  // S += Q K^T, 32 more
    }
    float x[MT][OWN_KEYS / 8][4], top[MT][2], weight[MT][2];
    auto find_tops = [&]() {
      UNROLL for (int i = 0; i < MT; i++) top[i][0] = top[i][1] = -INF;
      UNROLL for (int n = 0; n < OWN_KEYS / 8; n++) UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++) top[i][r >> 1] = fmaxf(top[i][r >> 1], x[i][n][r]);
    };
    UNROLL for (int n = 0; n < OWN_KEYS / 8; n++) {
      float ks[4];
      load_shared4(ks, at + K_SCALES_AT + part * OWN_KEYS * 8 + n * 64 + t * 16);
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++) x[i][n][r] = as_float(s[i][n][r]) * ks[r & 1] + ks[2 + (r & 1)];
    }
    // before the band's branch ptxas puts maxima between products: timed over FlashAttention-2 1.130 at 64, 1.101 after it; at 128 1.175, 1.185
    if (D == 64) find_tops();
    const int first_k = block * KEYS + part * OWN_KEYS;
    if (first_k + OWN_KEYS - 1 - row0 > high || first_k - (row0 + MT * 16 - 1) < low) {  // the band cuts the tile
      const int above = first_k + t * 2 - (row0 + g) - low;  // of key - query over the least, of the thread's first pair
      UNROLL for (int n = 0; n < OWN_KEYS / 8; n++) UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++)
        if ((u32)(above + n * 8 + (r & 1) - i * 16 - (r >> 1) * 8) > (u32)(high - low)) x[i][n][r] = -INF;
      if (D == 64) find_tops();
    }
    if (D == 128) find_tops();
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
      top[i][h] = fmaxf(top[i][h], from_lane_xor(top[i][h], 1));
      top[i][h] = fmaxf(top[i][h], from_lane_xor(top[i][h], 2));
    }
    if (SPLIT == 2) {  // the largest of all the block's keys
      const u32 tops = base + TOPS_AT + g * 4;
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++)
        if (t == 0) store_shared(tops + (warp * MT * 16 + i * 16 + h * 8) * 4, as_word(top[i][h]));
      wait_for_pair(warp / 2);
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++)
        top[i][h] = fmaxf(top[i][h], load_shared(tops + ((warp ^ 1) * MT * 16 + i * 16 + h * 8) * 4));
    }
    bool changed = false;
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
      top[i][h] = fmaxf(top[i][h] * qs[i][h], LOWEST);
      changed |= top[i][h] > m[i][h] + SLACK;
    }
    if (__any_sync(0xffffffffu, changed))
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
        const float y = top[i][h], decay = y > m[i][h] + SLACK ? exp2_of(m[i][h] - y) : 1.0f;
        m[i][h] = y > m[i][h] + SLACK ? y : m[i][h];
        l[i][h] *= decay;
        UNROLL for (int n = 0; n < OWN_D / 8; n++) UNROLL for (int b = 0; b < 2; b++) acc[i][n][2 * h + b] *= decay;  // alpha l, alpha O
      }
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
      weight[i][h] = exp2_of(top[i][h] - m[i][h]);
      top[i][h] -= LOG2_LEVELS;
    }
    u32 p[MT][KEYS / 32][4];  // of a warp's own keys, then of the other's
    UNROLL for (int i = 0; i < MT; i++) {
      float sum[4] = {0, 0, 0, 0};
      UNROLL for (int n = 0; n < OWN_KEYS / 8; n += 2) {
        u32 y[4];  // of 16 keys, as a product reads them
        UNROLL for (int e = 0; e < 2; e++) UNROLL for (int h = 0; h < 2; h++) {
          float two[2];
          UNROLL for (int b = 0; b < 2; b++) {
            two[b] = exp2_of(x[i][n + e][2 * h + b] * qs[i][h] - top[i][h]);  // (2) LEVELS P = exp2(S - block_max + log2(LEVELS))
            if (!PRODUCT_SUMS) sum[2 * h] += two[b];
          }
          y[2 * e + h] = to_fp16(two[0], two[1]);
        }
        if (PRODUCT_SUMS) add_rows(sum, y);
        UNROLL for (int h = 0; h < 2; h++)
          p[i][n / 4][(n & 2) + h] = __byte_perm(add_fp16(y[h], TWO_1152), add_fp16(y[2 + h], TWO_1152), 0x6420);
      }
      UNROLL for (int h = 0; h < 2; h++) l[i][h] += sum[2 * h] * weight[i][h];  // (3) l = alpha l + beta rowsum(P)
    }
    if (SPLIT == 2) {
      const u32 mine = base + CODES_AT + warp * CODES + lane * 16, other = base + CODES_AT + (warp ^ 1) * CODES + lane * 16;
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int k = 0; k < OWN_KEYS / 32; k++) store_shared4(mine + (i * (OWN_KEYS / 32) + k) * 512, p[i][k]);
      wait_for_pair(warp / 2);
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int k = 0; k < OWN_KEYS / 32; k++) {
        float words[4];
        load_shared4(words, other + (i * (OWN_KEYS / 32) + k) * 512);
        UNROLL for (int r = 0; r < 4; r++) p[i][OWN_KEYS / 32 * (SPLIT - 1) + k][r] = as_word(words[r]);
      }
    }
    UNROLL for (int n = 0; n < OWN_D / 8; n += AT_ONCE) {
      int sum[AT_ONCE][MT][4];  // (4) [GEMM] O = alpha O + beta P V
      UNROLL for (int c = 0; c < KEYS / 64; c++) {
        u32 b[AT_ONCE][4];
        UNROLL for (int e = 0; e < AT_ONCE; e++) load_matrices(b[e], at + ((v_lane ^ (c << 6)) + (n + e) * 8 * KEYS));
        UNROLL for (int e = 0; e < AT_ONCE; e++) UNROLL for (int i = 0; i < MT; i++) mma(start, c == 0, sum[e][i], p[i][2 * c], b[e][0], b[e][1]);  // P V, 32 keys
        UNROLL for (int e = 0; e < AT_ONCE; e++) UNROLL for (int i = 0; i < MT; i++) mma(sum[e][i], p[i][2 * c + 1], b[e][2], b[e][3]);  // P V, 32 more
      }
      UNROLL for (int e = 0; e < AT_ONCE; e++) {
        float vs[4];
        load_shared4(vs, at + V_SCALES_AT + first_d * 8 + (n + e) * 64 + t * 16);
        UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++)
          acc[i][n + e][r] += (as_float(sum[e][i][r]) * vs[r & 1] + vs[2 + (r & 1)]) * weight[i][r >> 1];  // O = alpha O + beta P V
      }
    }
  }
  // the keys that are apart: after the loop, whose registers are then the same with any number of them
  auto number_of = [&](int n) { return first_numbers ? first_numbers[batch * FIRST + n] : n; };
  auto scale_of = [&](int key) { return key < keys.length ? k_scale[z_k * total_k + keys.start + key] : 0.0f; };
  auto shown = [&](int key, int i, int h) {
    const int distance = key - (row0 + i * 16 + h * 8 + g);
    return key < keys.length && distance >= low && distance <= high;
  };
  if (FIRST == 16 && keys.length > 0) {
    int s[MT][2][4];
    UNROLL for (int j = 0; j < 2; j++) {
      const int key = number_of(j * 8 + g);
      const i8* at = k_int8 + (key < keys.length ? key : 0) * k_token + t * 4;
      UNROLL for (int i = 0; i < MT; i++) UNROLL for (int r = 0; r < 4; r++) s[i][j][r] = 0;
      UNROLL for (int k = 0; k < D / 32; k++) {
        const u32 low_word = *(const u32*)(at + k * 32), high_word = *(const u32*)(at + k * 32 + 16);
        UNROLL for (int i = 0; i < MT; i++) mma(s[i][j], q[i][k], low_word, high_word);  // [GEMM] S = Q K^T of the keys that are apart
      }
    }
    u32 p[MT][4];
    float decay[MT][2];
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
      float x[4], top = m[i][h], sum = 0;
      UNROLL for (int c = 0; c < 4; c++) {
        const int key = number_of((c >> 1) * 8 + t * 2 + (c & 1));
        x[c] = shown(key, i, h) ? (float)s[i][c >> 1][2 * h + (c & 1)] * scale_of(key) * qs[i][h] : -INF;
        top = fmaxf(top, x[c]);
      }
      top = fmaxf(top, from_lane_xor(top, 1));
      top = fmaxf(top, from_lane_xor(top, 2));
      decay[i][h] = exp2_of(m[i][h] - top);
      m[i][h] = top;
      UNROLL for (int c = 0; c < 4; c++) sum += x[c] = exp2_of(x[c] - top);  // P = exp2(S - m)
      if (PRODUCT_SUMS) sum = over_row(sum);
      l[i][h] = l[i][h] * decay[i][h] + (part == 0 ? sum * LEVELS : 0.0f);
      UNROLL for (int j = 0; j < 2; j++) p[i][2 * j + h] = to_16bit(x[2 * j], x[2 * j + 1]);
    }
    const u16* at = (const u16*)first_values + ((i64)owner * D + first_d + g) * 16 + t * 4;
    UNROLL for (int n = 0; n < OWN_D / 8; n++) {
      const u32* words = (const u32*)(at + n * 8 * 16);
      const u32 low_word = words[0], high_word = words[1];
      UNROLL for (int i = 0; i < MT; i++) {
        float sum[4] = {0, 0, 0, 0};
        mma_16bit(sum, p[i], low_word, high_word);  // [GEMM] P V of the keys that are apart
        UNROLL for (int r = 0; r < 4; r++) acc[i][n][r] = acc[i][n][r] * decay[i][r >> 1] + sum[r] * LEVELS;  // O = alpha O + P V
      }
    }
  }
  if (SPLIT == 2) {  // l of all keys
    __syncthreads();
    const u32 mine = base + warp * MT * 256 + lane * 4, other = base + (warp ^ 1) * MT * 256 + lane * 4;
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) store_shared(mine + (i * 2 + h) * 128, as_word(l[i][h]));
    wait_for_pair(warp / 2);
    UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) l[i][h] += load_shared(other + (i * 2 + h) * 128);
  }
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int h = 0; h < 2; h++) {
    const float sum = PRODUCT_SUMS ? l[i][h] : over_row(l[i][h]);
    const int row = row0 + i * 16 + h * 8 + g;
    if (row >= queries.length) continue;
    const bool blind = sum == 0;
    const float inverse = 1.0f / sum;
    if (t == 0 && part == 0) lse[z_q * total_q + queries.start + row] = blind ? -INF : (m[i][h] + log2_of(sum) - LOG2_LEVELS) * LN_2;
    u16* out = o + offset_of(o_batch, o_head, o_token, batch, head, queries.start + row);
    UNROLL for (int n = 0; n < OWN_D / 8; n++) {
      float y[2];
      UNROLL for (int b = 0; b < 2; b++) {
        const float mean = v_mean ? v_mean[(i64)owner * D + first_d + n * 8 + t * 2 + b] : 0.0f;
        y[b] = blind ? 0.0f : acc[i][n][2 * h + b] * inverse + mean;  // O /= l
      }
      *(u32*)(out + first_d + n * 8 + t * 2) = to_16bit(y[0], y[1]);
    }
  }
}
