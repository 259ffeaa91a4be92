// dQ of the FP32 sums that backward adds up: rotated back, in 16 bits. A warp has 16 queries, a thread block 64.

constexpr int QUERIES = 64;
static_assert(WARPS * 16 == QUERIES, "a warp has 16 queries");

// sums (heads, blocks, 64 D) in the order of registers: of 16 queries row 8 h + g and channel 8 n + 2 t + b lie at
// [n, h, b, g, t]; ADDS_FOUR, channel 16 n + 8 e + 2 t + b at [n, h, g, t, e, b]. dq by its strides.
KERNEL finish(const float* sums, u16* dq, i64 dq_batch, i64 dq_head, i64 dq_token, const int* cu_seqlens, i64 heads, i64 tokens, i64 blocks, i64 grid) {
  const Place place(blockIdx.x % (int)grid, blockIdx.x / (int)grid, cu_seqlens, (int)tokens, (int)heads, QUERIES);
  const int number = place.number, owner = place.owner, batch = place.batch, head = place.head;
  const Sequence queries(cu_seqlens, batch, tokens);
  if (number * QUERIES >= queries.length) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, first = number * QUERIES + warp * 16;
  const i64 z = cu_seqlens ? head : owner;
  sums += (z * blocks + queries.padded(cu_seqlens, batch, QUERIES) + number) * (QUERIES * D) + warp * 16 * D;
  float x[2][D / 4];
#if ADDS_FOUR
  UNROLL for (int n = 0; n < D / 8; n++) {
    const uint4 four = *(const uint4*)(sums + n * 128 + lane * 4);
    float* at = x[n & 1] + (n >> 1) * 4;
    at[0] = as_float(four.x);
    at[1] = as_float(four.y);
    at[2] = as_float(four.z);
    at[3] = as_float(four.w);
  }
#else
  UNROLL for (int n = 0; n < D / 8; n++) UNROLL for (int r = 0; r < 4; r++) x[r >> 1][2 * n + (r & 1)] = sums[n * 128 + r * 32 + lane];
#endif
  dq += offset_of(dq_batch, dq_head, dq_token, batch, head, queries.start + first);
  UNROLL for (int h = 0; h < 2; h++) {
    turn_back(x[h], 1.0f, t);
    store_row(dq + (8 * h + g) * dq_token, first + 8 * h + g < queries.length, x[h], t);
  }
}
