// What backward reads of its queries, in one launch: values by token, codes of dO, Q's codes transposed.
// A thread block has 64 queries of a head, of which four threads share each.

constexpr int QUERIES = 64;
static_assert(THREADS == 4 * QUERIES, "four threads share a query");
constexpr u32 DO_AT = 0, Q_AT = D * QUERIES, LARGEST_AT = 2 * D * QUERIES;
constexpr int WORDS = D / 16;  // of a thread: codes of channels 32 (i / 2) + 8 t + 4 (i % 2) and three more

// Swizzle of a channel's row of 64 bytes, in pairs of words: of 32 lanes no two write one bank.
DEVICE int swizzle_of(int channel) { return (channel >> 3 & 3) | (channel >> 1 & 1) << 2; }

// Codes of a query a thread, four channels a word, to words of four queries of a channel in shared memory, (D, 64).
// Queries of a word are 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of 16: n of 0 to 3, in lanes that differ in 4 and 8.
DEVICE void store_transposed(u32 to, u32* w, int warp, int lane) {
  const int t = lane & 3, n = lane >> 2 & 3;
  const bool odd = n & 1, upper = n & 2;
  UNROLL for (int i = 0; i < WORDS; i += 2) {
    u32 other = (u32)from_lane_xor((int)__byte_perm(w[i], w[i + 1], odd ? 0x6420 : 0x7531), 4);
    w[i] = __byte_perm(w[i], other, odd ? 0x3514 : 0x5240);  // two queries of channels odd and odd + 2
    w[i + 1] = __byte_perm(w[i + 1], other, odd ? 0x3716 : 0x7260);
    other = (u32)from_lane_xor((int)__byte_perm(w[i], w[i + 1], upper ? 0x5410 : 0x7632), 8);
    w[i] = __byte_perm(w[i], other, upper ? 0x3254 : 0x5410);  // four queries of channel n
    w[i + 1] = __byte_perm(w[i + 1], other, upper ? 0x3276 : 0x7610);
    UNROLL for (int k = 0; k < 2; k++) {
      const int channel = 16 * i + 8 * t + 4 * k + n;
      store_shared(to + channel * QUERIES + ((warp ^ swizzle_of(channel)) << 3) + (lane >> 4) * 4, w[i + k]);
    }
  }
}
// The tile (D, 64) from shared memory to rows `pitch` bytes apart.
DEVICE void write_transposed(i8* to, i64 pitch, u32 from) {
  UNROLL for (int i = 0; i < D * QUERIES / 16 / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, channel = at / 4, piece = at % 4, swizzle = swizzle_of(channel);
    u32 w[4];
    load_words4(w, from + channel * QUERIES + ((2 * piece ^ (swizzle & 6)) << 3));
    *(uint4*)(to + channel * pitch + piece * 16) = swizzle & 1 ? make_uint4(w[2], w[3], w[0], w[1]) : make_uint4(w[0], w[1], w[2], w[3]);
  }
}
DEVICE u32 word_of(const float* x) { return pack(x[0], x[1], x[2], x[3]); }

// d_o, o, q_int8 and do_int8 by their strides. lse, dlse (or null) and q_scale (heads, total). do_t, q_t, do_scale, values: as
// backward reads them; a block of dO that is zero has scale 0, so that sums lose no bits to it. delta = rowsum(dO O) - dlse.
// INT8_DP: center, c R (batch, heads / group, D), and do_int8, codes of dO R, of a scale s a token; delta = s rowsum(codes
// (O - c) R) - dlse, so that dP and delta share dO's rounding. Else both are null.
KERNEL row_values(const u16* d_o, i64 do_batch, i64 do_head, i64 do_token, const u16* o, i64 o_batch, i64 o_head, i64 o_token,
                  const i8* q_int8, i64 q_batch, i64 q_head, i64 q_token, const float* lse, const float* dlse, const float* q_scale, const float* center,
                  i8* do_int8, i64 do_int8_batch, i64 do_int8_head, i64 do_int8_token, i8* do_t, i8* q_t, float* do_scale, float* values,
                  const int* cu_seqlens, i64 heads, i64 group, i64 tokens, i64 total, i64 blocks, i64 grid) {
  const Place place(blockIdx.x % (int)grid, blockIdx.x / (int)grid, cu_seqlens, (int)tokens, (int)heads, QUERIES);
  const int number = place.number, owner = place.owner, batch = place.batch, head = place.head;
  const Sequence queries(cu_seqlens, batch, tokens);
  const int first = number * QUERIES;
  if (first >= queries.length) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, n = lane >> 2 & 3;
  const int local = (warp >> 1) * 16 + (warp & 1) * 4 + (lane >> 4) * 2 + (n >> 1) * 8 + (n & 1), token = queries.start + first + local;
  const bool inside = first + local < queries.length;
  const i64 z = cu_seqlens ? head : owner, block = z * blocks + queries.padded(cu_seqlens, batch, QUERIES) + number, row = z * total + token;
  const u32 base = shared_base();

  d_o += offset_of(do_batch, do_head, do_token, batch, head, token) + 8 * t;
  o += offset_of(o_batch, o_head, o_token, batch, head, token) + 8 * t;
  q_int8 += offset_of(q_batch, q_head, q_token, batch, head, token) + 8 * t;
  Eight of_do[D / 32], of_o[D / 32];
  u32 of_q[WORDS];
  UNROLL for (int j = 0; j < D / 32; j++) of_do[j] = load_eight(d_o + 32 * j, inside);
  UNROLL for (int j = 0; j < D / 32; j++) of_o[j] = load_eight(o + 32 * j, inside);
  UNROLL for (int j = 0; j < D / 32; j++) {
    const uint2 two = inside ? *(const uint2*)(q_int8 + 32 * j) : make_uint2(0, 0);
    of_q[2 * j] = two.x;
    of_q[2 * j + 1] = two.y;
  }
  float row_lse = inside ? lse[row] : -INF, row_scale = inside ? q_scale[row] : 0.0f, delta = 0;
  const float row_dlse = inside && dlse ? dlse[row] : 0.0f;
  const float seen = row_lse == -INF ? 0.0f : 1.0f;  // dO of a query that sees no key is 0 in dV; NaN stays

  float amax = 0;
  UNROLL for (int j = 0; j < D / 32; j++) UNROLL for (int c = 0; c < 8; c++) amax = max_nan(amax, fabsf(of_do[j].at(c)));
  amax *= seen;
  UNROLL for (int far = 1; far < 32; far *= 2) amax = max_nan(amax, from_lane_xor(amax, far));
  if (lane == 0) store_shared(base + LARGEST_AT + warp * 4, as_word(amax));
  store_transposed(base + Q_AT, of_q, warp, lane);
  float x[D / 4];
  UNROLL for (int i = 0; i < D / 4; i++) x[i] = of_do[i / 8].at(i % 8);
#if INT8_DP
  if (TURNED) turn<8>(x, t);  // dO R
  float largest = 0;
  UNROLL for (int i = 0; i < D / 4; i++) {
    if (TURNED) x[i] *= factor_of(channel_of<8>(i, t));
    largest = max_nan(largest, fabsf(x[i]));
  }
  const float scale = psi_scale(largest_over_row(largest)), inverse = reciprocal(scale);
  UNROLL for (int i = 0; i < D / 4; i++) x[i] = coded(x[i], scale, inverse);
  if (inside) UNROLL for (int j = 0; j < D / 32; j++)
    *(uint2*)(do_int8 + offset_of(do_int8_batch, do_int8_head, do_int8_token, batch, head, token) + 32 * j + 8 * t) = make_uint2(word_of(x + 8 * j), word_of(x + 8 * j + 4));
  center += (i64)(owner / (int)group) * D + 8 * t;
  float y[D / 4];
  UNROLL for (int i = 0; i < D / 4; i++) y[i] = of_o[i / 8].at(i % 8);
  if (TURNED) turn<8>(y, t);  // O R
  UNROLL for (int i = 0; i < D / 4; i += 4) {
    const uint4 of_center = *(const uint4*)(center + i / 8 * 32 + i % 8);
    const u32 c[4] = {of_center.x, of_center.y, of_center.z, of_center.w};
    UNROLL for (int k = i; k < i + 4; k++) {
      if (TURNED) y[k] *= factor_of(channel_of<8>(k, t));
      delta += (x[k] - MAGIC_F) * (y[k] - as_float(c[k - i]));
    }
  }
#else
  UNROLL for (int i = 0; i < D / 4; i++) delta += x[i] * of_o[i / 8].at(i % 8);
#endif
  delta = over_row(delta);
#if INT8_DP
  delta *= scale;
#endif
  delta -= row_dlse;
  // + 0 delta: backward looks for NaN in P, so it must be there even if O or dlse alone has it
  row_lse = (row_lse == -INF ? INF : row_lse * LOG2_E) + delta * 0.0f;
  values += block * (QUERIES * 4);
#if INT8_DP
  if (t == 0) {
    *(float2*)(values + 2 * local) = make_float2(row_lse, row_scale);
    *(float2*)(values + 2 * QUERIES + 2 * local) = make_float2(delta * row_scale, scale * row_scale);
  }
#else
  if (t == 0) *(uint4*)(values + 4 * local) = make_uint4(as_word(row_lse), as_word(delta), as_word(row_scale), 0);
#endif

  __syncthreads();  // maxima of all warps are here
  float maxima[WARPS];
  UNROLL for (int i = 0; i < WARPS; i += 4) load_shared4(maxima + i, base + LARGEST_AT + i * 4);
  UNROLL for (int i = 0; i < WARPS; i++) amax = max_nan(amax, maxima[i]);
  const float block_scale = psi_scale(amax), block_inverse = reciprocal(block_scale);
  if (threadIdx.x == 0) do_scale[block] = amax < TINY ? 0.0f : block_scale;
  u32 of_block[WORDS];
  UNROLL for (int i = 0; i < WORDS; i++) {
    float y[4];
    UNROLL for (int c = 0; c < 4; c++) y[c] = coded(of_do[i / 2].at(i % 2 * 4 + c) * seen, block_scale, block_inverse);
    of_block[i] = word_of(y);
  }
  store_transposed(base + DO_AT, of_block, warp, lane);
  __syncthreads();
  const i64 pitch = blocks * QUERIES, column = z * D * pitch + (block - z * blocks) * QUERIES;
  write_transposed(do_t + column, pitch, base + DO_AT);
  write_transposed(q_t + column, pitch, base + Q_AT);
}
