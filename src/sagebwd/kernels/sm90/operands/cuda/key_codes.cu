// Codes of K of what projections wrote, less its mean of the sums that query_codes.cu left.

constexpr int KEYS = 128, LANES = 4;  // of a block; a scale is of the keys 8 i + 2 lane + b of it
constexpr u32 WEIGHTS_AT = 0, MEANS_AT = D * 4, LARGEST_MEAN_AT = MEANS_AT + HEADS * D * 4, FOUND_AT = LARGEST_MEAN_AT + HEADS * 4;
constexpr u32 FOUND = WARPS * (LANES + 1) * 4;  // bytes of what warps tell each other, twice: of one head and the next
static_assert(WARPS * 16 == KEYS, "a thread has two keys of a block");

DEVICE void add_four(float* sum, const float* at) {
  const uint4 x = *(const uint4*)at;
  sum[0] += as_float((int)x.x);
  sum[1] += as_float((int)x.y);
  sum[2] += as_float((int)x.z);
  sum[3] += as_float((int)x.w);
}

// A thread block has a block of keys, several heads one after another. k, codes, cos and sin: as query_codes.cu has q's.
// scales (heads, total) and inverse_rms, one a key; lane_scales (heads, blocks, 4); mean (batch, heads, D); largest: raised
// to what no norm of a head's keys as codes exceeds; taken: set to 0.
KERNEL key_codes(const u16* k, i64 k_batch, i64 k_head, i64 k_token, i8* k_int8, i64 k_int8_batch, i64 k_int8_head, i64 k_int8_token,
                 float* k_scale, float* lane_scale, float* inverse_rms, const void* weight, const u8* cos, const u8* sin, i64 table_batch,
                 i64 table_token, const float* sums, const float* turned_sums, const float* counts, float* mean, float* largest, int* taken,
                 const int* cu_seqlens, i64 heads, i64 tokens, i64 total, i64 blocks, i64 chunk, i64 chunks, i64 all_heads, float eps) {
  const Lane lane;
  const u32 base = shared_base();
  const int groups = ((int)heads + HEADS - 1) / HEADS, program = blockIdx.x, grid = cu_seqlens ? (int)blocks : max(((int)tokens + KEYS - 1) / KEYS, 1);
  const int first = program % groups * HEADS, last = min(first + HEADS, (int)heads);
  const Place place(program / groups % grid, program / (groups * grid), cu_seqlens, (int)tokens, 1, KEYS);
  const int batch = place.batch, block = place.number;
  const Sequence keys(cu_seqlens, batch, (int)tokens);
  // a forward reads the scales of one block of a sequence without keys too
  if (block >= max((keys.length + KEYS - 1) / KEYS, 1)) return;
  if (program == 0 && threadIdx.x == 0) *taken = 0;

  const int row = block * KEYS + 16 * lane.warp + lane.g;  // and 8 more
  const bool inside[2] = {row < keys.length, row + 8 < keys.length};
  int token[2];
  UNROLL for (int n = 0; n < 2; n++) token[n] = max(keys.start + min(row + 8 * n, keys.length - 1), 0);
  const u16* rows = k + batch * k_batch;
  UNROLL for (int n = 0; n < 2; n++) prefetch_row(rows + first * k_head + token[n] * k_token, lane.t);

  const int first_chunk = keys.padded(cu_seqlens, batch, (int)chunk);
  if (cu_seqlens) {
    const int size = its_chunk(cu_seqlens, (int)chunk, keys.length);
    chunks = (keys.length + size - 1) / size;
  }
  share_weights(base + WEIGHTS_AT, weight);
  if (threadIdx.x < HEADS) store_shared(base + LARGEST_MEAN_AT + threadIdx.x * 4, 0);
  __syncthreads();
  for (int i = 4 * threadIdx.x; i < (last - first) * D; i += 4 * THREADS) {
    const int owner = batch * (int)heads + first + i / D, channel = i % D;
    float count = 0, sum[4] = {0, 0, 0, 0}, turned[4] = {0, 0, 0, 0};
    for (int n = 0; n < chunks; n++) {
      const i64 at = (first_chunk + n) * all_heads + (cu_seqlens ? first + i / D : owner);
      count += counts[at];
      if (!TURNED || block == 0) add_four(sum, sums + at * D + channel);
      if (TURNED) add_four(turned, turned_sums + at * D + channel);
    }
    count = fmaxf(count, 1.0f);
    UNROLL for (int c = 0; c < 4; c++) {
      if (block == 0) mean[(i64)owner * D + channel + c] = sum[c] / count;
      const float mu = (TURNED ? turned[c] : sum[c]) / count;
      store_shared(base + MEANS_AT + (i + c) * 4, as_word(mu));
      max_shared(base + LARGEST_MEAN_AT + i / D * 4, fabsf(mu));
    }
  }
  const Signs<> signs(lane);
  __syncthreads();
#pragma unroll 1
  for (int head = first; head < last; head++) {
    Eight x[2][J];
    UNROLL for (int n = 0; n < 2; n++) {
      const u16* at = rows + head * k_head + token[n] * k_token;
      load_row(x[n], at, lane.t);
      if (head + 1 < last) prefetch_row(at + k_head, lane.t);
    }
    u32 y[2][J][4];
    float r[2], z[2][J][8], of_row[2] = {0, 0}, squares[2] = {0, 0};
    UNROLL for (int n = 0; n < 2; n++) {
      Table table;
      const i64 angles = batch * table_batch + token[n] * table_token;
      if (ROPE) table.load(cos + angles, sin + angles, lane.t);
      r[n] = prepare_row(x[n], base + WEIGHTS_AT, eps, table, y[n]);
      fence();  // registers of one row's angles at a time
    }
    times_r(y, signs, z);
    UNROLL for (int j = 0; j < J; j++) {
      float mu[8];
      const u32 means = base + MEANS_AT + ((head - first) * D + 32 * j + 8 * lane.t) * 4;
      load_shared4(mu, means);
      load_shared4(mu + 4, means + 16);
      UNROLL for (int n = 0; n < 2; n++) UNROLL for (int c = 0; c < 8; c++) {
        float& centred = z[n][j][c];
        centred = TURNED ? fmaf(centred, ROOT, -mu[c]) : centred - mu[c];
        of_row[n] = max_nan(of_row[n], fabsf(centred));
        squares[n] = fmaf(centred, centred, squares[n]);
      }
    }
    // a warp's largest of each lane's scale, and its largest square of a norm
    UNROLL for (int n = 0; n < 2; n++) {
      of_row[n] = inside[n] ? of_row[n] : 0.0f;
      squares[n] = inside[n] ? squares[n] : 0.0f;
    }
    float amax = largest_over_row(max_nan(of_row[0], of_row[1]));
    amax = max_nan(amax, from_lane_xor(amax, 4));
    float square = max_nan(over_row(squares[0]), over_row(squares[1]));
    UNROLL for (int far = 4; far < 32; far *= 2) square = max_nan(square, from_lane_xor(square, far));
    const u32 found = base + FOUND_AT + (head - first & 1) * FOUND;
    if ((threadIdx.x & 7) == 0) store_shared(found + (lane.warp * LANES + (lane.g >> 1)) * 4, as_word(amax));
    if ((threadIdx.x & 31) == 0) store_shared(found + (WARPS * LANES + lane.warp) * 4, as_word(square));
    __syncthreads();
    UNROLL for (int w = 0; w < WARPS; w++) amax = max_nan(amax, load_shared(found + (w * LANES + (lane.g >> 1)) * 4));
    // of keys that are all alike only rounding is left
    if (TURNED && amax < load_shared(base + LARGEST_MEAN_AT + (head - first) * 4) * ROUNDING) amax = 0;
    const float scale = psi_scale(amax), inverse = reciprocal(scale);
    const i64 owner = batch * heads + head, z_head = cu_seqlens ? head : owner, place = z_head * total + keys.start + row;
    UNROLL for (int n = 0; n < 2; n++) {
      if (!inside[n]) continue;
      store_codes(z[n], inverse, k_int8 + offset_of(k_int8_batch, k_int8_head, k_int8_token, batch, head, keys.start + row + 8 * n), lane.t);
      if (lane.t == 0) {
        k_scale[place + 8 * n] = scale;
        if (NORM) inverse_rms[place + 8 * n] = r[n];
      }
    }
    if (lane.warp == 0) {
      if ((threadIdx.x & 7) == 0) lane_scale[(z_head * blocks + keys.padded(cu_seqlens, batch, KEYS) + block) * LANES + (lane.g >> 1)] = scale;
      // a lane of zeros has the scale 1, and nothing to round
      float step = amax == 0 ? 0.0f : scale;
      step = max_nan(step, from_lane_xor(step, 8));
      step = max_nan(step, from_lane_xor(step, 16));
      if (threadIdx.x == 0) {
        UNROLL for (int w = 1; w < WARPS; w++) square = max_nan(square, load_shared(found + (WARPS * LANES + w) * 4));
        max_global(largest + owner, sqrtf(square) + step * (0.5f * ROOT * D));
      }
    }
  }
}
