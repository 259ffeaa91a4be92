// Codes of Q, K and V in one launch, as forward.cu reads them: a thread block has 256 rows of Q or K, or 128 of V.

constexpr int TILE = 256, KEYS = 128, STEP = THREADS / 4;  // four threads share a row of Q or K
constexpr int CHUNKS = D / 8, UNITS = KEYS / 4 * CHUNKS / THREADS;  // of V a thread has UNITS times 4 tokens x 8 channels
constexpr u32 CODES_AT = 0, LARGEST_AT = D * KEYS, SUMS_AT = LARGEST_AT + D * 4;
constexpr float ROUNDING = 0x1p-18f;  // of kernels/common/rotation.py

// Rows of a sequence of a head from x on: codes, scales (one a token), and of keys scales by pairs or null; mean and mask
// or null. Keys up to the one numbered `last` are apart.
DEVICE void quantize_rows(const u16* x, i64 pitch, const float* mean, const u8* mask, i8* codes, i64 codes_pitch, float* scales,
                          float* pairs, int first, int length, int last) {
  const int t = threadIdx.x & 3, end = pairs ? (length + KEYS - 1) / KEYS * KEYS : length;
  float taken_off[D / 32][8], least = 0;
  UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++) taken_off[j][c] = mean ? mean[32 * j + 8 * t + c] : 0.0f;
  if (TURNED && mean) {
    turn<8>(taken_off[0], t);
    UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++) least = fmaxf(least, fabsf(taken_off[j][c]));
    least = fmaxf(least, from_lane_xor(least, 1));
    least = fmaxf(least, from_lane_xor(least, 2)) * ROUNDING;  // of keys that are all alike only rounding is left
  }
#pragma unroll 1
  for (int row = first + threadIdx.x / 4; row < first + TILE; row += STEP) {
    const bool inside = row < length, keep = inside && (!mask || mask[row]);
    float y[D / 32][8], amax = 0;
    UNROLL for (int j = 0; j < D / 32; j++) {
      const Eight part = load_eight(x + row * pitch + 32 * j + 8 * t, keep);
      UNROLL for (int c = 0; c < 8; c++) y[j][c] = part.at(c);
    }
    if (TURNED) turn<8>(y[0], t);
    UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++) {
      y[j][c] -= taken_off[j][c];
      if ((mean || mask) && fabsf(y[j][c]) < (keep ? least : INF)) y[j][c] = 0;
      if (TURNED) y[j][c] *= factor_of(32 * j + 8 * t + c);
      amax = max_nan(amax, fabsf(y[j][c]));
    }
    amax = max_nan(amax, from_lane_xor(amax, 1));
    amax = max_nan(amax, from_lane_xor(amax, 2));
    const float scale = psi_scale(amax), inverse = reciprocal(scale);
    if (inside) {
      UNROLL for (int j = 0; j < D / 32; j++) {
        u32 word[2];
        UNROLL for (int w = 0; w < 2; w++)
          word[w] = pack(coded(y[j][4 * w], scale, inverse), coded(y[j][4 * w + 1], scale, inverse),
                         coded(y[j][4 * w + 2], scale, inverse), coded(y[j][4 * w + 3], scale, inverse));
        *(uint2*)(codes + row * codes_pitch + 32 * j + 8 * t) = make_uint2(word[0], word[1]);
      }
      if (t == 0) scales[row] = scale;
    }
    if (pairs && t == 0 && row < end) {
      float* pair = pairs + (row >> 1) * 4 + (row & 1);
      const bool seen = keep && row > last;
      pair[0] = seen ? scale : 0.0f;
      pair[2] = seen ? scale * -MAGIC_F : -INF;
    }
  }
}

// 128 tokens of V less its mean from x on: codes, (D, tokens) with tokens interleaved, and scales by pairs of channels.
DEVICE void quantize_values(const u16* x, i64 pitch, const float* mean, const u8* mask, int left, i8* codes, i64 codes_pitch, float* pairs) {
  const u32 base = shared_base();
  const int chunk = threadIdx.x % CHUNKS, lane = threadIdx.x & 31;
  for (int i = threadIdx.x; i < 2 * D; i += THREADS) store_shared(base + LARGEST_AT + i * 4, 0);
  float shift[8], amax[8];
  UNROLL for (int c = 0; c < 8; c++) { shift[c] = mean ? mean[chunk * 8 + c] : 0.0f; amax[c] = 0; }
  Eight rows[UNITS][4];
  bool keep[UNITS][4];
  auto four_of = [&](int u) { return (int)threadIdx.x / CHUNKS + u * (THREADS / CHUNKS); };
  UNROLL for (int u = 0; u < UNITS; u++) UNROLL for (int n = 0; n < 4; n++) {
    const int four = four_of(u), token = (four >> 2) * 16 + (four & 3) * 2 + (n >> 1) * 8 + (n & 1);
    keep[u][n] = token < left && (!mask || mask[token]);
    rows[u][n] = load_eight(x + token * pitch + chunk * 8, keep[u][n]);
  }
  auto value = [&](int u, int n, int c) { return keep[u][n] ? rows[u][n].at(c) - shift[c] : 0.0f; };
  UNROLL for (int u = 0; u < UNITS; u++) UNROLL for (int n = 0; n < 4; n++) UNROLL for (int c = 0; c < 8; c++) amax[c] = max_nan(amax[c], fabsf(value(u, n, c)));
  __syncthreads();
  UNROLL for (int c = 0; c < 8; c++) {
    UNROLL for (int far = CHUNKS; far < 32; far *= 2) amax[c] = max_nan(amax[c], from_lane_xor(amax[c], far));
    if (lane < CHUNKS) max_shared(base + LARGEST_AT + (c * CHUNKS + chunk) * 4, amax[c]);
  }
  __syncthreads();
  UNROLL for (int c = 0; c < 8; c++) {
    const float scale = psi_scale(load_shared(base + LARGEST_AT + (c * CHUNKS + chunk) * 4)), inverse = reciprocal(scale);
    int sum = 0;
    UNROLL for (int u = 0; u < UNITS; u++) {
      const int four = four_of(u);
      const u32 word = pack(coded(value(u, 0, c), scale, inverse), coded(value(u, 1, c), scale, inverse),
                            coded(value(u, 2, c), scale, inverse), coded(value(u, 3, c), scale, inverse));
      sum = __dp4a((int)word, 0x01010101, sum);
      // of 32 lanes no two write one bank
      store_shared(base + CODES_AT + (chunk * 8 + c) * KEYS + (((four >> 2) ^ (chunk & 7)) << 4) + (((four & 3) ^ (chunk >> 3 << 1)) << 2), word);
    }
    UNROLL for (int far = CHUNKS; far < 32; far *= 2) sum += from_lane_xor(sum, far);
    if (lane < CHUNKS) add_shared(base + SUMS_AT + (c * CHUNKS + chunk) * 4, sum);
  }
  __syncthreads();
  UNROLL for (int i = 0; i < D * KEYS / 16 / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, channel = at / 8, piece = at % 8, its_chunk = channel >> 3;
    float w[4];
    load_shared4(w, base + CODES_AT + channel * KEYS + ((piece ^ (its_chunk & 7)) << 4));
    const bool turned = its_chunk >> 3;
    *(uint4*)(codes + channel * codes_pitch + piece * 16) =
        make_uint4(as_word(turned ? w[2] : w[0]), as_word(turned ? w[3] : w[1]), as_word(turned ? w[0] : w[2]), as_word(turned ? w[1] : w[3]));
  }
  if (threadIdx.x < D) {
    const int channel = threadIdx.x, at = ((channel & 7) * CHUNKS + (channel >> 3)) * 4;
    const float scale = psi_scale(load_shared(base + LARGEST_AT + at));
    float* pair = pairs + (channel >> 1) * 4 + (channel & 1);
    pair[0] = scale;
    pair[2] = ((float)((int)as_word(load_shared(base + SUMS_AT + at)) * 128) - MAGIC_F) * scale;
  }
}

// q, k, v, q8 and k8 by their strides. k_mean and v_mean (batch, heads_k, D), or null. key_mask (batch, tokens_k) or null.
// q_scale (heads, total_q), k_scale (heads_k, total_k). v8_t, k_scales, v_scales, first_values, first_numbers: as forward
// reads them. Of scales by pairs the second two are what a sum that starts from MAGIC lacks, times the first two: of V,
// whose codes meet P's less 128, 128 times the codes' sum too. grids: thread blocks of a head's rows of Q, K and V.
KERNEL quantize(const u16* q, i64 q_batch, i64 q_head, i64 q_token, const u16* k, i64 k_batch, i64 k_head, i64 k_token, const u16* v,
                i64 v_batch, i64 v_head, i64 v_token, const float* k_mean, const float* v_mean, const u8* key_mask, const int* first_numbers,
                i8* q8, i64 q8_batch, i64 q8_head, i64 q8_token, float* q_scale, i8* k8, i64 k8_batch, i64 k8_head, i64 k8_token,
                float* k_scale, float* k_scales, i8* v8_t, float* v_scales, void* first_values, const int* cu_seqlens_q, const int* cu_seqlens_k,
                i64 batches, i64 heads, i64 heads_k, i64 tokens_q, i64 tokens_k, i64 total_q, i64 total_k, i64 blocks_k, i64 grid_q, i64 grid_k,
                i64 grid_v) {
  int program = blockIdx.x;
  const int of_q = (int)(grid_q * batches * heads), of_k = (int)(grid_k * batches * heads_k);
  if (program < of_q) {
    const int number = program % (int)grid_q, owner = program / (int)grid_q, batch = owner / (int)heads, head = owner % (int)heads;
    const Sequence queries(cu_seqlens_q, batch, tokens_q);
    if (number * TILE >= queries.length) return;
    const i64 z = cu_seqlens_q ? head : owner;
    quantize_rows(q + offset_of(q_batch, q_head, q_token, batch, head, queries.start), q_token, nullptr, nullptr,
                  q8 + offset_of(q8_batch, q8_head, q8_token, batch, head, queries.start), q8_token, q_scale + z * total_q + queries.start, nullptr,
                  number * TILE, queries.length, -1);
    return;
  }
  program -= of_q;
  const bool of_values = program >= of_k;
  if (of_values) program -= of_k;
  const int grid = (int)(of_values ? grid_v : grid_k), number = program % grid, owner = program / grid, batch = owner / (int)heads_k, head = owner % (int)heads_k;
  const Sequence keys(cu_seqlens_k, batch, tokens_k);
  const i64 z = cu_seqlens_k ? head : owner;
  const int padded = keys.padded(cu_seqlens_k, batch, KEYS);
  const u8* mask = key_mask ? key_mask + batch * tokens_k : nullptr;
  if (number * (of_values ? KEYS : TILE) >= keys.length) return;
  if (!of_values) {
    const int last = FIRST == 0 ? -1 : first_numbers ? first_numbers[batch * FIRST + FIRST - 1] : FIRST - 1;
    quantize_rows(k + offset_of(k_batch, k_head, k_token, batch, head, keys.start), k_token, k_mean ? k_mean + owner * D : nullptr, mask,
                  k8 + offset_of(k8_batch, k8_head, k8_token, batch, head, keys.start), k8_token, k_scale + z * total_k + keys.start,
                  k_scales + (z * blocks_k + padded) * (KEYS * 2), number * TILE, keys.length, last);
    return;
  }
  const u16* rows = v + offset_of(v_batch, v_head, v_token, batch, head, keys.start);
  const float* mean = v_mean ? v_mean + owner * D : nullptr;
  const int first = number * KEYS;
  quantize_values(rows + first * v_token, v_token, mean, mask ? mask + first : nullptr, keys.length - first,
                  v8_t + z * D * blocks_k * KEYS + (padded + number) * KEYS, blocks_k * KEYS, v_scales + (z * blocks_k + padded + number) * (D * 2));
  if (FIRST && number == 0) {  // V of the keys that are apart
    for (int i = threadIdx.x; i < FIRST * D; i += THREADS) {
      const int n = i / D, channel = i % D, key = first_numbers ? first_numbers[batch * FIRST + n] : n;
      const float y = key < keys.length ? from_16bit(rows[key * v_token + channel]) - (mean ? mean[channel] : 0.0f) : 0.0f;
      if (FIRST == 1) ((float*)first_values)[owner * D + channel] = y;
      else ((u16*)first_values)[(owner * D + channel) * FIRST + (n >> 1 & 3) * 4 + (n >> 3) * 2 + (n & 1)] = (u16)to_16bit(y, 0.0f);
    }
  }
}
