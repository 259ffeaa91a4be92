// Gradients of what projections wrote, and of the norms' weights: dQ of its sums and dK, back through rotary embedding
// and RMS norm. rows.cuh says how a thread has rows; macros beside its own: STAGES, of heads' tiles in shared memory.
// A thread block has TOKENS of a sequence, two heads at a time, whose tiles are copied while others are computed:
// registers hold no load that is under way. A thread's two rows are one token's, with the same cos and sin, which the
// nearest cache may have lost since the heads before. Sums of dQ lie by channel and are transposed by ldmatrix.

constexpr int TOKENS = 8 * WARPS, EIGHTS = TOKENS / 8, PIECES = D / 8;  // of a tile: tokens and channels by 16 bytes
constexpr u32 ROW = 2 * D, TILE = TOKENS * ROW, STAGE = (NORM ? 4 : 2) * TILE;  // bytes of a head's rows, of a tile, of two heads'
constexpr u32 WEIGHTS_AT = 0, STAGES_AT = 4 * D;
static_assert(STAGES > 1 && EIGHTS >= 4, "a tile is copied while another is computed; places below");
static_assert(STAGE >= WARPS * D * 4, "shares of warps");

// Byte of 8 channels of a token's row: four pieces side by side of two rows lie in 32 banks.
DEVICE u32 of_row(int token, int piece) { return token * ROW + ((piece ^ (token & 1) << 2) << 4); }
// Byte of 8 tokens' sums of a channel: those of channels 8 t + b, t of four and b of two, lie in 32 banks.
DEVICE u32 of_channel(int channel, int eight) {
  const int t = channel >> 3 & 3;
  return channel * (2 * TOKENS) + ((eight ^ (EIGHTS == 4 ? t : t << 1 | channel & 1)) << 4);
}

// A tensor of 16 bits by token and head.
struct Tensor {
  u16* at;
  i64 batch, head, token;
  DEVICE u16* row(int b, int h, int n) const { return at + offset_of(batch, head, token, b, h, n); }
};
// Queries or keys: x, what their projection wrote, its gradient dx, their norms, and each program's share of the weight's.
struct Side {
  Tensor x, dx;
  const float* inverse_rms;
  const void* weight;
  float* share;
  const u8 *cos, *sin;
  i64 table_batch, table_token;
  int heads, tokens, blocks, sequences;  // of packed ones: blocks of TOKENS in a padded layout, and how many they are
};
// What dQ is made of: sums (heads, D, blocks * block), spread, a factor a query, largest, bits of each key head's K.
struct Sums {
  const u16* at;
  const float* spread;
  const int *largest, *cu_seqlens;
  const int* cu_seqlens_k;
  i64 total, blocks, block;
  int heads_k;
  float scale;
};

// 2^-g after `float8_factor` of bwd_preprocess.py; NaN where the largest was not finite.
DEVICE float float8_scale(int bits) {
  const int exponent = max((bits + 0x1FFFFF) >> 23, 16);
  return as_float(bits >= 0x7F800000 ? 0x7FC00000 : (exponent - 8) << 23);
}

// 1 over the scale of the sums of a packed sequence of so many keys (`sum_scale_of_length` in bwd_postprocess.py).
DEVICE float sum_scale_undone(int keys) {
  const int bits = (int)(as_word((float)max(keys - 1, 0)) >> 23) - 126;
  return as_float((130 + max(bits, 0)) << 23);
}

// Copy a tile of rows `pitch` apart, zeros from row `left` on; at: of the thread's first piece.
DEVICE void copy_rows(u32 to, const u16* at, i64 pitch, int left) {
  constexpr int TURN = THREADS / PIECES;  // rows that all threads copy at a time
  static_assert(TURN % 2 == 0, "of_row is every turn's");
  const int token = threadIdx.x / PIECES;
  to += of_row(token, threadIdx.x % PIECES);
  UNROLL for (int i = 0; i < TOKENS / TURN; i++) {
    copy16(to + i * TURN * ROW, at, token + i * TURN < left);
    at = opaque(at + TURN * pitch);  // one pointer, in place of one for each turn
  }
}
// Copy a tile of sums, of which every channel's lie `pitch` apart; at: of the thread's first 8.
DEVICE void copy_sums(u32 to, const u16* at, i64 pitch) {
  constexpr int TURN = THREADS / EIGHTS;  // 16
  const u32 place = of_channel(threadIdx.x / EIGHTS, threadIdx.x % EIGHTS);
  UNROLL for (int i = 0; i < D / TURN; i++) {
    copy16(to + i * TURN * 2 * TOKENS + (place ^ of_channel(i % 2 * TURN, 0) % (2 * TOKENS)), at, true);
    at = opaque(at + TURN * pitch);
  }
}

// Gradients z of two rows, of those of the turned ones; dw: added to. r: 1 / rms. x: bytes where each row's tile is.
DEVICE void finish_token(float z[2][J][8], const u32* x, int token, const float* r, const u8* cos_at, const u8* sin_at, u32 weights, float dw[J][8]) {
  const int t = threadIdx.x & 3;
#if ROPE
  UNROLL for (int p = 0; p < J / 2; p++) {
    fence();  // registers of two chunks' angles at a time
    const int chunks[2] = {INTERLEAVED ? 2 * p : p, INTERLEAVED ? 2 * p + 1 : p + J / 2};
    Angles cos[2], sin[2];
    UNROLL for (int m = 0; m < 2; m++) {
      cos[m].load(cos_at + (32 * chunks[m] + 8 * t) * TABLE_BYTES);
      sin[m].load(sin_at + (32 * chunks[m] + 8 * t) * TABLE_BYTES);
    }
    // da = da' cos_a + db' sin_b, db = db' cos_b - da' sin_a
    UNROLL for (int i = 0; i < 8; i++) {
      const int m_a = INTERLEAVED ? i / 4 : 0, m_b = INTERLEAVED ? m_a : 1, c_a = INTERLEAVED ? i % 4 * 2 : i, c_b = INTERLEAVED ? c_a + 1 : i;
      const float cos_a = cos[m_a].at(c_a), sin_a = sin[m_a].at(c_a), cos_b = cos[m_b].at(c_b), sin_b = sin[m_b].at(c_b);
      UNROLL for (int n = 0; n < 2; n++) {
        float &a = z[n][chunks[m_a]][c_a], &b = z[n][chunks[m_b]][c_b];
        const float turned_a = a, turned_b = b;
        a = turned_a * cos_a + turned_b * sin_b;
        b = turned_b * cos_b - turned_a * sin_a;
      }
    }
  }
#endif
#if NORM
  // dw += dz x r, dx = r (dz w - x r mean(dz w x r))
  float products[2] = {0, 0};
  UNROLL for (int j = 0; j < J; j++) {
#if WEIGHT_BYTES
    float w[8];
    load_shared4(w, weights + (32 * j + 8 * t) * 4);
    load_shared4(w + 4, weights + (32 * j + 8 * t + 4) * 4);
#endif
    fence();  // and of one chunk's x and w
    UNROLL for (int n = 0; n < 2; n++) {
      u32 words[4];
      load_words4(words, x[n] + of_row(token, 4 * j + t));
      UNROLL for (int c = 0; c < 8; c++) {
        const float unit = value_of(words, c) * r[n];
#if WEIGHT_BYTES
        dw[j][c] = fmaf(z[n][j][c], unit, dw[j][c]);
        z[n][j][c] *= w[c];
#endif
        products[n] = fmaf(z[n][j][c], unit, products[n]);
      }
    }
  }
  UNROLL for (int n = 0; n < 2; n++) {
    const float mean = over_row(products[n]) * (1.0f / D) * r[n];
    UNROLL for (int j = 0; j < J; j++) {
      u32 words[4];  // again: to keep them takes registers
      load_words4(words, x[n] + of_row(token, 4 * j + t));
      UNROLL for (int c = 0; c < 8; c++) z[n][j][c] = fmaf(-mean, value_of(words, c), z[n][j][c]) * r[n];
    }
  }
#endif
}

// A program of queries (their sums) or of keys (dK, by its strides).
template <bool QUERIES> DEVICE void finish_rows(const Side& side, const Sums& sums, const Tensor& dk, int program) {
  const Lane lane;
  const u32 base = shared_base();
  // packed keys are one sequence: they have nothing in common but places in cos and sin
  const int* offsets = QUERIES ? sums.cu_seqlens : nullptr;
  const int groups = (side.heads + HEADS - 1) / HEADS, grid = offsets ? side.blocks : max((side.tokens + TOKENS - 1) / TOKENS, 1);
  const Place place(program / groups % grid, program / (groups * grid), offsets, side.sequences, 1, TOKENS);
  const int batch = place.batch, first = place.number * TOKENS;
  const int begin = program % groups * HEADS, end = min(begin + HEADS, side.heads);
  const Sequence rows(offsets, batch, side.tokens);
  // rows behind the last offset, where shapes are fixed, are nobody's and may be anything
  const int length = !QUERIES && sums.cu_seqlens_k ? sums.cu_seqlens_k[side.sequences] : rows.length;
  const int start = rows.start + first, left = length - first;
  if (left <= 0) {
#pragma unroll 1
    for (int i = threadIdx.x; side.share && i < D; i += THREADS) side.share[(i64)program * D + i] = 0;
    return;
  }
  const int row = 8 * lane.warp + lane.g;
  const bool inside = row < left;

  // what the thread copies and stores of a head, and the next head's
  const i64 pitch = sums.blocks * sums.block, z = QUERIES && sums.cu_seqlens ? begin : batch * side.heads + begin;
  const int turn = threadIdx.x / (QUERIES ? EIGHTS : PIECES), piece = 8 * (threadIdx.x % (QUERIES ? EIGHTS : PIECES));
  const u16 *gradient_at, *x_at = side.x.row(batch, begin, start + threadIdx.x / PIECES) + 8 * (threadIdx.x % PIECES);
  if (QUERIES) gradient_at = sums.at + (z * D + turn) * pitch + rows.padded(sums.cu_seqlens, batch, (int)sums.block) * sums.block + first + piece;
  else gradient_at = dk.row(batch, begin, start + turn) + piece;
  int copied = 0;  // heads
  auto copy_heads = [&]() {
    u32 to = base + STAGES_AT + copied / 2 % STAGES * STAGE;
    UNROLL for (int n = 0; n < 2; n++) {
      if (begin + copied < end) {
        if (QUERIES) copy_sums(to, gradient_at, pitch);
        else copy_rows(to, gradient_at, dk.token, left);
        if (NORM) copy_rows(to + TILE, x_at, side.x.token, left);
        gradient_at += QUERIES ? D * pitch : dk.head;
        x_at += side.x.head;
      }
      to += STAGE / 2;
      copied++;
    }
    commit_copies();
  };
  // values by token, loaded while the heads before are computed
  i64 row_at = z * (QUERIES ? sums.total : side.tokens) + start + row;
  const int group = QUERIES ? side.heads / sums.heads_k : 1;
  int owner = batch * sums.heads_k + begin / group, in_group = begin % group, loaded = begin;
  float spread[2] = {0, 0}, r[2] = {0, 0};
  int largest[2] = {0, 0};
  auto load_heads = [&]() {
    UNROLL for (int n = 0; n < 2; n++) {
      const bool there = inside && loaded < end;
      if (QUERIES) spread[n] = there ? sums.spread[row_at] : 0.0f;
      if (NORM) r[n] = there ? side.inverse_rms[row_at] : 0.0f;
      if (QUERIES) largest[n] = loaded < end ? sums.largest[owner] : 0;
      if (++in_group == group) {
        in_group = 0;
        owner++;
      }
      row_at += QUERIES ? sums.total : side.tokens;
      loaded++;
    }
  };

  UNROLL for (int n = 0; n < STAGES - 1; n++) copy_heads();
  load_heads();
  share_weights(base + WEIGHTS_AT, side.weight);
  const Signs<true> signs(lane);
  const float scale = sums.scale * (QUERIES && sums.cu_seqlens_k ? sum_scale_undone(Sequence(sums.cu_seqlens_k, batch, 0).length) : 1.0f);
  u16* dx = side.dx.row(batch, begin, start + row);
  const i64 angles = batch * side.table_batch + (start + min(row, left - 1)) * side.table_token;
  float dw[J][8];
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) dw[j][c] = 0;
#pragma unroll 1
  for (int head = begin; head < end; head += 2) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // what all copied is there, and nobody reads the tiles that are copied next
    copy_heads();
    const float r_now[2] = {r[0], r[1]}, root = scale * (TURNED ? ROOT : 1.0f);
    const float factor[2] = {spread[0] * (float8_scale(largest[0]) * root), spread[1] * (float8_scale(largest[1]) * root)};
    if (head + 2 < end) load_heads();
    const u32 tile = base + STAGES_AT + (head - begin) / 2 % STAGES * STAGE;
    const bool second = head + 1 < end;  // else its rows are the first's again, times 0
    float z[2][J][8];
    if (QUERIES) {
      // dQ = dQ' R, in 16 bits
      const int r8 = threadIdx.x & 7, channel = 8 * (r8 >> 1) + 2 * ((threadIdx.x & 31) >> 3) + (r8 & 1);
      UNROLL for (int j = 0; j < J; j++) {
        u32 words[2][4];
        UNROLL for (int n = 0; n < 2; n++) load_matrices_transposed(words[n], tile + (n && second ? STAGE / 2 : 0) + of_channel(32 * j + channel, lane.warp));
        if (TURNED) times_signs(words[0], words[1], signs, z[0][j], z[1][j]);
        else UNROLL for (int n = 0; n < 2; n++) UNROLL for (int c = 0; c < 8; c++) z[n][j][c] = from_fp16((u16)(words[n][c >> 1] >> 16 * (c & 1)));
      }
      if (TURNED) add_fours(z);
      UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < J; j++) UNROLL for (int w = 0; w < 4; w++) {
        const u32 rounded = to_16bit(z[n][j][2 * w] * factor[n], z[n][j][2 * w + 1] * factor[n]);
        UNROLL for (int b = 0; b < 2; b++) z[n][j][2 * w + b] = value_of(&rounded, b);
      }
    } else {
      UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < J; j++) {
        u32 words[4];
        load_words4(words, tile + (n && second ? STAGE / 2 : 0) + of_row(row, 4 * j + lane.t));
        UNROLL for (int c = 0; c < 8; c++) z[n][j][c] = value_of(words, c);
      }
    }
    const u32 x[2] = {tile + TILE, tile + TILE + (second ? STAGE / 2 : 0)};
    const i64 at = opaque(angles);  // a sum each, in place of two pointers
    finish_token(z, x, row, r_now, side.cos + at, side.sin + at, base + WEIGHTS_AT, dw);
    UNROLL for (int n = 0; n < 2; n++) {
      UNROLL for (int j = 0; j < J; j++) {
        u32 out[4];
        UNROLL for (int w = 0; w < 4; w++) out[w] = to_16bit(z[n][j][2 * w], z[n][j][2 * w + 1]);
        if (inside && (!n || second)) *(uint4*)(dx + 32 * j + 8 * lane.t) = make_uint4(out[0], out[1], out[2], out[3]);
      }
      dx += side.dx.head;
    }
  }
#if WEIGHT_BYTES
  if (!side.share) return;
  __syncthreads();
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) {
    UNROLL for (int far = 4; far < 32; far *= 2) dw[j][c] += from_lane_xor(dw[j][c], far);
    if (lane.g == 0) store_shared(base + STAGES_AT + (lane.warp * D + 32 * j + 8 * lane.t + c) * 4, as_word(dw[j][c]));
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < D; i += THREADS) {
    float sum = 0;
    for (int w = 0; w < WARPS; w++) sum += load_shared(base + STAGES_AT + (w * D + i) * 4);
    side.share[(i64)program * D + i] = sum;
  }
#endif
}

// q_programs of queries, then those of keys. sums, spread, largest: `Sums`; q, dq, dk_out, k, dk by their strides, cos and
// sin by bytes between sequences and tokens, which lie alike; inverse_rms: 1 / rms of rows; shares (programs, D).
KERNEL finish_gradients(const u16* sums, const float* spread, const int* largest, const int* cu_seqlens, const int* cu_seqlens_k, i64 sequences, i64 q_blocks, i64 total,
                        i64 blocks, i64 block, float scale,
                        u16* q, i64 q_batch, i64 q_head, i64 q_token, u16* dq, i64 dq_batch, i64 dq_head, i64 dq_token,
                        const float* q_inverse_rms, const void* q_weight, float* q_share, const u8* q_cos, const u8* q_sin, i64 q_table_batch,
                        i64 q_table_token, i64 heads, i64 tokens, i64 q_programs, u16* dk_out, i64 dk_out_batch, i64 dk_out_head, i64 dk_out_token,
                        u16* k, i64 k_batch, i64 k_head, i64 k_token, u16* dk, i64 dk_batch, i64 dk_head, i64 dk_token,
                        const float* k_inverse_rms, const void* k_weight, float* k_share, const u8* k_cos, const u8* k_sin, i64 k_table_batch,
                        i64 k_table_token, i64 heads_k, i64 tokens_k) {
  const Sums of_queries = {sums, spread, largest, cu_seqlens, cu_seqlens_k, total, blocks, block, (int)heads_k, scale};
  const Tensor of_keys = {dk_out, dk_out_batch, dk_out_head, dk_out_token};
  if (blockIdx.x < (int)q_programs) {
    const Side queries = {{q, q_batch, q_head, q_token}, {dq, dq_batch, dq_head, dq_token}, q_inverse_rms, q_weight, q_share, q_cos, q_sin, q_table_batch, q_table_token, (int)heads, (int)tokens, (int)q_blocks, (int)sequences};
    finish_rows<true>(queries, of_queries, of_keys, blockIdx.x);
  } else {
    const Side keys = {{k, k_batch, k_head, k_token}, {dk, dk_batch, dk_head, dk_token}, k_inverse_rms, k_weight, k_share, k_cos, k_sin, k_table_batch, k_table_token, (int)heads_k, (int)tokens_k, 0, (int)sequences};
    finish_rows<false>(keys, of_queries, of_keys, blockIdx.x - (int)q_programs);
  }
}
