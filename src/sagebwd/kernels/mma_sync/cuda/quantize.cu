// Codes of Q, K and V in one launch, as forward.cu reads them: a thread block has TILE rows of Q or K, or 128 of V.

constexpr int TILE = 256, KEYS = 128, BLOCK = D * KEYS + KEYS * 8 + D * 8;  // bytes of V's codes and scales by pairs
constexpr int CHUNKS = D / 8, UNITS = KEYS / 4 * CHUNKS / THREADS;  // of V a thread has UNITS times 4 tokens x 8 channels
constexpr u32 CODES_AT = 0, LARGEST_AT = D * KEYS, SCALES_AT = LARGEST_AT + D * 4;  // of V
constexpr u32 MEAN_AT = 0, LEAST_AT = D * 4;  // of K

// ---- R, channels of which TURNED are turned ----
// A thread has channels 32 j + 8 t + c of a row, c < 8, in four words. The two rows of a product's operand are words
// 0 and 2, and 1 and 3: the product with signs adds up over bits 0, 2, 3 and 4 of a channel's number, INSIDE. Sums and
// differences of a thread's own numbers do over the others.

constexpr int INSIDE = 29;
constexpr bool EVEN = TURNED == 0 || TURNED == D;  // one factor of all channels

// factor_of, but 0 behind the last block of an R of part of the channels, where are remains of odd ones.
DEVICE float kept_factor_of(int channel) { return TURNED && channel >= TURNED ? 0 : factor_of(channel); }
// R's sign between two channels over some bits: 1 where it is negative. Bit n of 0x6996 is 1 where n has an odd number of ones.
DEVICE u32 is_negative(int a, int b, int bits) {
  const int both = a & b & bits & (span_of(a) >> 1);
  return 0x6996 >> ((both ^ both >> 4) & 15) & 1;
}
DEVICE bool together(int a, int b) { return span_of(a) == span_of(b); }  // in one block of R
// Signs over INSIDE, two of 16 bits, from channels a and a + 1 to b.
DEVICE u32 two_signs(int a, int b) {
  u32 word = 0;
  UNROLL for (int n = 0; n < 2; n++)
    if (together(a + n, b)) word |= ((HALF ? 0x3C00u : 0x3F80u) | is_negative(a + n, b, INSIDE) << 15) << 16 * n;
  return word;
}
// A product's operand, from channels 32 j and so on to those of which c is 4 f to 4 f + 3.
DEVICE void signs_of(u32* b, int j, int f) {
  const int lane = threadIdx.x & 31, from = 32 * j + 8 * (lane & 3), to = 32 * j + 8 * (lane >> 3) + 4 * f + (lane >> 2 & 1);
  UNROLL for (int h = 0; h < 2; h++) b[h] = two_signs(from + 4 * h, to);
}
// Sums and differences over the bits that are not INSIDE.
DEVICE void turn_outside(float x[D / 32][8], int t) {
  UNROLL for (int n = 0; n <= D / 64; n++) UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++) {
    const int bit = n == 0 ? 2 : 16 << n, other_j = n == 0 ? j : j | bit / 32, other_c = n == 0 ? c | 2 : c;
    if (other_j == j && other_c == c) continue;
    float &low = x[j][c], &high = x[other_j][other_c];
    const float sum = low + high, difference = low - high;
    const bool whole = n == 0 && j < TURNED / 32;
    if (whole || span_of(32 * j + (n == 0 ? 8 * t + c : 0)) >> 1 & bit) { low = sum; high = difference; }
  }
}

// 8 numbers of 16 bits, as words of an operand.
struct EightWords {
  u32 words[4];
  DEVICE float at(int c) const { return from_16bit((u16)(c & 1 ? words[c / 2] >> 16 : words[c / 2])); }
};
DEVICE EightWords load_eight_words(const u16* at, bool there) {
  EightWords x = {{0, 0, 0, 0}};
  if (there) {
    const uint4 words = *(const uint4*)at;
    x = {{words.x, words.y, words.z, words.w}};
  }
  return x;
}

// Minus the mean, or null, times R over INSIDE, into shared memory; the number under which what is left of a key is rounding.
DEVICE float turn_mean(const float* mean) {
  const u32 base = shared_base();
  const int channel = threadIdx.x;
  if (channel == 0) store_shared(base + LEAST_AT, 0);
  if (channel < D) {
    float sum = TURNED || !mean ? 0.0f : mean[channel];
    if (TURNED && mean) UNROLL for (int n = 0; n < 16; n++) {
      const int other = (channel & ~INSIDE) + (n & 1) + (n >> 1) * 4;
      if (together(other, channel)) sum += is_negative(other, channel, INSIDE) ? -mean[other] : mean[other];
    }
    store_shared(base + MEAN_AT + channel * 4, as_word(-sum));
  }
  __syncthreads();
  if (!TURNED) return 0;
  if (channel < D) {
    float sum = 0;
    UNROLL for (int n = 0; n < D / 16; n++) {
      const int other = (channel & INSIDE) + (n & 1) * 2 + (n >> 1) * 32;
      const float x = load_shared(base + MEAN_AT + other * 4);
      if (together(other, channel)) sum += is_negative(other, channel, ~INSIDE) ? -x : x;
    }
    sum = fabsf(sum);
    UNROLL for (int far = 1; far < 32; far *= 2) sum = max_nan(sum, from_lane_xor(sum, far));
    if ((threadIdx.x & 31) == 0) max_shared(base + LEAST_AT, sum);
  }
  __syncthreads();
  return load_shared(base + LEAST_AT) * ROUNDING;  // of keys that are all alike only rounding is left
}

// Rows of Q, or of K, of a sequence of a head from x on: codes and scales, one a token. Of K its mean and mask, or null, and
// scales by pairs; keys up to the one numbered `last` are apart. A warp has MT tiles of 16 rows at a time, a thread two rows of each.
template <bool OF_KEYS> DEVICE void quantize_rows(const u16* x, i64 pitch, const float* mean, const u8* mask, i8* codes, i64 codes_pitch, float* scales,
                          float* pairs, int first, int length, int last) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, end = (length + KEYS - 1) / KEYS * KEYS;
  const float least = OF_KEYS ? turn_mean(mean) : 0.0f;
  const u32 mean_at = shared_base() + MEAN_AT + 32 * t;
  u32 whole[2][2], rest[2][2];  // signs, of 32 channels in one block of R and of the last that are not
  UNROLL for (int f = 0; f < 2; f++) {
    if (TURNED >= 32) signs_of(whole[f], 0, f);
    if (TURNED % 32) signs_of(rest[f], TURNED / 32, f);
  }
#pragma unroll 1
  for (int row0 = first + (threadIdx.x >> 5) * MT * 16 + g; row0 < first + TILE + g; row0 += WARPS * MT * 16) {
    const u16* from = x + row0 * pitch + 8 * t;
    i8* to = codes + row0 * codes_pitch + 8 * t;
    EightWords parts[MT * 2][D / 32];
    bool keep[MT * 2];
    UNROLL for (int i = 0; i < MT * 2; i++) {
      const int row = row0 + 8 * i;
      keep[i] = row < length && (!OF_KEYS || !mask || mask[row]);
      UNROLL for (int j = 0; j < D / 32; j++) parts[i][j] = load_eight_words(from + 8 * i * pitch + 32 * j, keep[i]);
    }
    UNROLL for (int i = 0; i < MT * 2; i++) {
      const int row = row0 + 8 * i;
      const bool inside = row < length;
      float y[D / 32][8];
      UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int f = 0; f < 2; f++) {
        float start[4] = {0, 0, 0, 0};
        if (OF_KEYS) load_shared4(start, mean_at + 128 * j + 16 * f);
        if (j * 32 < TURNED) {
          const u32* signs = j < TURNED / 32 ? whole[f] : rest[f];
          mma_16bit(start, y[j] + 4 * f, parts[i][j].words, signs[0], signs[1]);  // (x - mean) R over INSIDE
        } else {
          UNROLL for (int c = 0; c < 4; c++) y[j][4 * f + c] = parts[i][j].at(4 * f + c) + start[c];
        }
      }
      if (TURNED) turn_outside(y, t);
      auto largest = [&]() {
        float amax = 0;
        UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++) amax = max_nan(amax, fabsf(y[j][c]));
        return largest_over_row(amax);
      };
      if (!EVEN) UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++) y[j][c] *= kept_factor_of(32 * j + 8 * t + c);
      float amax = largest();
      const float under = keep[i] ? least : INF;
      if (OF_KEYS && __any_sync(0xffffffffu, amax < 256 * under)) {  // else the code of what is under it is 0
        UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++)
          if (fabsf(y[j][c]) < (EVEN ? under : under * kept_factor_of(32 * j + 8 * t + c))) y[j][c] = 0;
        amax = largest();
      }
      const float factor = EVEN ? kept_factor_of(0) : 1.0f, scale = psi_scale(amax * factor), inverse = reciprocal(scale) * factor;
      if (inside) {
        UNROLL for (int j = 0; j < D / 32; j++) {
          u32 word[2];
          UNROLL for (int w = 0; w < 2; w++) {
            float code[4];  // y / scale, rounded as it is added to MAGIC
            UNROLL for (int c = 0; c < 4; c++) code[c] = fmaf(y[j][4 * w + c], inverse, MAGIC_F);
            word[w] = pack(code[0], code[1], code[2], code[3]);
          }
          *(uint2*)(to + 8 * i * codes_pitch + 32 * j) = make_uint2(word[0], word[1]);
        }
        if (t == 0) scales[row] = scale;
      }
      if (OF_KEYS && t == 0 && row < end) {
        float* pair = pairs + (row / KEYS) * (BLOCK / 4) + (row % KEYS >> 1) * 4 + (row & 1);
        const bool seen = keep[i] && row > last;
        pair[0] = seen ? scale : 0.0f;
        pair[2] = seen ? scale * -MAGIC_F : -INF;
      }
    }
  }
}

// 128 tokens of V less its mean from x on: codes, (D, 128) with tokens interleaved, and scales by pairs of channels.
DEVICE void quantize_values(const u16* x, i64 pitch, const float* mean, const u8* mask, int left, i8* codes, float* pairs) {
  const u32 base = shared_base();
  const int chunk = threadIdx.x % CHUNKS, lane = threadIdx.x & 31;
  EightWords rows[UNITS][4];
  float keep[UNITS][4];
  const int four = threadIdx.x / CHUNKS, token0 = (four >> 2) * 16 + (four & 3) * 2;
  x += token0 * pitch + chunk * 8;
  UNROLL for (int u = 0; u < UNITS; u++) UNROLL for (int n = 0; n < 4; n++) {
    const int further = u * (KEYS / UNITS) + (n >> 1) * 8 + (n & 1), token = token0 + further;
    const bool there = token < left && (!mask || mask[token]);
    rows[u][n] = load_eight_words(x + further * pitch, there);
    keep[u][n] = there ? 1.0f : 0.0f;
  }
  float shift[8];
  UNROLL for (int c = 0; c < 8; c++) shift[c] = mean ? mean[chunk * 8 + c] : 0.0f;
  if (threadIdx.x < D) store_shared(base + LARGEST_AT + threadIdx.x * 4, 0);
  __syncthreads();
  // largest and least numbers of two channels at a time: max |V - mean| is of one of them, as rounding keeps order
  EightWords high, low;
  UNROLL for (int w = 0; w < 4; w++) {
    high.words[w] = TWO_INF | 0x80008000u;
    low.words[w] = TWO_INF;
    UNROLL for (int u = 0; u < UNITS; u++) UNROLL for (int n = 0; n < 4; n++) if (keep[u][n] != 0.0f) {
      high.words[w] = max_two(high.words[w], rows[u][n].words[w]);
      low.words[w] = min_two(low.words[w], rows[u][n].words[w]);
    }
    UNROLL for (int far = CHUNKS; far < 32; far *= 2) {
      high.words[w] = max_two(high.words[w], (u32)from_lane_xor((int)high.words[w], far));
      low.words[w] = min_two(low.words[w], (u32)from_lane_xor((int)low.words[w], far));
    }
  }
  if (lane < CHUNKS) UNROLL for (int c = 0; c < 8; c++) {
    const float amax = max_nan(max_nan(high.at(c) - shift[c], shift[c] - low.at(c)), 0.0f);
    max_shared(base + LARGEST_AT + (c * CHUNKS + chunk) * 4, fabsf(amax));
  }
  __syncthreads();
  if (threadIdx.x < D) {
    const float scale = psi_scale(load_shared(base + LARGEST_AT + threadIdx.x * 4));
    store_shared(base + SCALES_AT + threadIdx.x * 8, as_word(scale));
    store_shared(base + SCALES_AT + threadIdx.x * 8 + 4, as_word(reciprocal(scale)));
  }
  __syncthreads();
  UNROLL for (int c = 0; c < 8; c++) {
    float scale[2];  // and its inverse
    load_shared2(scale, base + SCALES_AT + (c * CHUNKS + chunk) * 8);
    UNROLL for (int u = 0; u < UNITS; u++) {
      const int sixteen = (four >> 2) + u * (KEYS / UNITS / 16);
      float code[4];
      UNROLL for (int n = 0; n < 4; n++) code[n] = divide(fmaf(keep[u][n], -shift[c], rows[u][n].at(c)), scale[0], scale[1]) + MAGIC_F;
      // of 32 lanes no two write one bank
      store_shared(base + CODES_AT + (chunk * 8 + c) * KEYS + ((sixteen ^ (chunk & 7)) << 4) + (((four & 3) ^ (chunk >> 3 << 1)) << 2),
                   pack(code[0], code[1], code[2], code[3]));
    }
  }
  __syncthreads();
  i8* to = codes + threadIdx.x * 16;
  UNROLL for (int i = 0; i < D * KEYS / 16 / THREADS; i++) {  // eight lanes have the codes of a channel
    const int at = i * THREADS + threadIdx.x, channel = at / 8, piece = at % 8, its_chunk = channel >> 3;
    u32 w[4];
    load_words4(w, base + CODES_AT + channel * KEYS + ((piece ^ (its_chunk & 7)) << 4));
    const bool turned = its_chunk >> 3;
    *(uint4*)(to + i * THREADS * 16) = make_uint4(turned ? w[2] : w[0], turned ? w[3] : w[1], turned ? w[0] : w[2], turned ? w[1] : w[3]);
    int sum = 0;
    UNROLL for (int n = 0; n < 4; n++) sum = __dp4a((int)w[n], 0x01010101, sum);
    UNROLL for (int far = 1; far < 8; far *= 2) sum += from_lane_xor(sum, far);
    if (piece == 0) {
      const float scale = load_shared(base + SCALES_AT + ((channel & 7) * CHUNKS + its_chunk) * 8);
      float* pair = pairs + (channel >> 1) * 4 + (channel & 1);
      pair[0] = scale;
      pair[2] = ((float)(sum * 128) - MAGIC_F) * scale;
    }
  }
}

// q, k, v, q_int8 and k_int8 by their strides. k_mean and v_mean (batch, heads_k, D), or null. key_mask (batch, tokens_k) or null.
// q_scale (heads, total_q), k_scale (heads_k, total_k). values, first_values, first_numbers: as forward
// reads them. Of scales by pairs the second two are what a sum that starts from MAGIC lacks, times the first two: of V,
// whose codes meet P's less 128, 128 times the codes' sum too. grids: thread blocks of a head's rows of Q, K and V.
KERNEL quantize(const u16* q, i64 q_batch, i64 q_head, i64 q_token, const u16* k, i64 k_batch, i64 k_head, i64 k_token, const u16* v,
                i64 v_batch, i64 v_head, i64 v_token, const float* k_mean, const float* v_mean, const u8* key_mask, const int* first_numbers,
                i8* q_int8, i64 q_int8_batch, i64 q_int8_head, i64 q_int8_token, float* q_scale, i8* k_int8, i64 k_int8_batch, i64 k_int8_head, i64 k_int8_token,
                float* k_scale, u8* values, void* first_values, const int* cu_seqlens_q, const int* cu_seqlens_k,
                i64 all_heads, i64 all_heads_k, i64 heads, i64 heads_k, i64 tokens_q, i64 tokens_k, i64 total_q, i64 total_k, i64 blocks_k, i64 grid_q, i64 grid_k,
                i64 grid_v) {
  int program = gridDim.x - 1 - blockIdx.x;  // the last first: V, which the means have read last, is in L2
  const int of_q = (int)(grid_q * all_heads), of_k = (int)(grid_k * all_heads_k);
  if (program < of_q) {
    const Place place(program % (int)grid_q, program / (int)grid_q, cu_seqlens_q, (int)tokens_q, (int)heads, TILE);
    const int number = place.number, owner = place.owner, batch = place.batch, head = place.head;
    const Sequence queries(cu_seqlens_q, batch, tokens_q);
    if (number * TILE >= queries.length) return;
    const i64 z = cu_seqlens_q ? head : owner;
    quantize_rows<false>(q + offset_of(q_batch, q_head, q_token, batch, head, queries.start), q_token, nullptr, nullptr,
                  q_int8 + offset_of(q_int8_batch, q_int8_head, q_int8_token, batch, head, queries.start), q_int8_token, q_scale + z * total_q + queries.start, nullptr,
                  number * TILE, queries.length, -1);
    return;
  }
  program -= of_q;
  const bool of_values = program >= of_k;
  if (of_values) program -= of_k;
  const int grid = (int)(of_values ? grid_v : grid_k);
  const Place place(program % grid, program / grid, cu_seqlens_k, (int)tokens_k, (int)heads_k, of_values ? KEYS : TILE);
  const int number = place.number, owner = place.owner, batch = place.batch, head = place.head;
  const Sequence keys(cu_seqlens_k, batch, tokens_k);
  const i64 z = cu_seqlens_k ? head : owner;
  const int padded = keys.padded(cu_seqlens_k, batch, KEYS);
  const u8* mask = key_mask ? key_mask + batch * tokens_k : nullptr;
  if (number * (of_values ? KEYS : TILE) >= keys.length) return;
  if (!of_values) {
    const int last = FIRST == 0 ? -1 : first_numbers ? first_numbers[batch * FIRST + FIRST - 1] : FIRST - 1;
    quantize_rows<true>(k + offset_of(k_batch, k_head, k_token, batch, head, keys.start), k_token, k_mean ? k_mean + (i64)owner * D : nullptr, mask,
                  k_int8 + offset_of(k_int8_batch, k_int8_head, k_int8_token, batch, head, keys.start), k_int8_token, k_scale + z * total_k + keys.start,
                  (float*)(values + (z * blocks_k + padded) * BLOCK + D * KEYS), number * TILE, keys.length, last);
    return;
  }
  const u16* rows = v + offset_of(v_batch, v_head, v_token, batch, head, keys.start);
  const float* mean = v_mean ? v_mean + (i64)owner * D : nullptr;
  const int first = number * KEYS;
  u8* block = values + (z * blocks_k + padded + number) * BLOCK;
  quantize_values(rows + first * v_token, v_token, mean, mask ? mask + first : nullptr, keys.length - first, (i8*)block,
                  (float*)(block + D * KEYS + KEYS * 8));
  if (FIRST && number == 0) {  // V of the keys that are apart
    for (int i = threadIdx.x; i < FIRST * D; i += THREADS) {
      const int n = i / D, channel = i % D, key = first_numbers ? first_numbers[batch * FIRST + n] : n;
      const float y = key < keys.length ? from_16bit(rows[key * v_token + channel]) - (mean ? mean[channel] : 0.0f) : 0.0f;
      ((u16*)first_values)[((i64)owner * D + channel) * FIRST + (n >> 1 & 3) * 4 + (n >> 3) * 2 + (n & 1)] = (u16)to_16bit(y, 0.0f);
    }
  }
}
