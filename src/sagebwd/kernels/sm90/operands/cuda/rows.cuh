// Rows of Q and K normalised, rotated by their positions, and times R: what query_codes.cu, key_codes.cu and finish_gradients.cu share.
// Four threads have two rows, of D / 4 channels each: 32 j + 8 t + c at [j][c], t the thread's number in its four, as
// the first operand of a product m16n8k16 has them, whose rows g and g + 8 are a thread's. So the two channels of a
// pair are one thread's, and R's levels between threads, and two others, are a product with 16 x 16 signs.
// Macros beside common.cuh's: HEADS of a program; NORM and ROPE, 1 where there is one; INTERLEAVED, pairs are channels
// side by side, else D / 2 apart; WEIGHT_BYTES, 0 without; TABLE_BYTES, of a number of cos and sin: 2, as x, or 4, FP32.
// Threads beyond the last row load it again and store nothing.

constexpr int J = D / 32;  // chunks of 8 channels of a thread
constexpr float ROOT = D == 64 ? 0.125f : 0.08838834764831845f;  // 1 / sqrt(D)
static_assert(TURNED == 0 || TURNED == D, "R is of all channels");

// Chunks of keys of a packed sequence: of `chunk` tokens, or of as many more as leave no more than MOST_CHUNKS. They lie
// as blocks of `chunk` in a padded layout (`its_chunk` in kernels/common/chunks.py).
constexpr int MOST_CHUNKS = 16;
DEVICE int its_chunk(const int* cu_seqlens, int chunk, int length) {
  const int wanted = (length + MOST_CHUNKS - 1) / MOST_CHUNKS;
  while (cu_seqlens && chunk < wanted) chunk *= 2;
  return chunk;
}

// A thread's place: of four threads, and the row of 8.
struct Lane {
  int t, g, warp;
  DEVICE Lane() { t = threadIdx.x & 3; g = (threadIdx.x & 31) >> 2; warp = threadIdx.x >> 5; }
};

// 8 numbers of cos or sin.
struct Angles {
  uint4 words[TABLE_BYTES / 2];
  DEVICE void load(const u8* at) {
    UNROLL for (int i = 0; i < TABLE_BYTES / 2; i++) words[i] = ((const uint4*)at)[i];
  }
  DEVICE float at(int c) const {
#if TABLE_BYTES == 4
    const uint4 four = words[c >> 2];
    return as_float((int)((c & 3) == 0 ? four.x : (c & 3) == 1 ? four.y : (c & 3) == 2 ? four.z : four.w));
#else
    return Eight{words[0]}.at(c);
#endif
  }
};
// A token's of a thread's channels.
struct Table {
  Angles cos[J], sin[J];
  DEVICE void load(const u8* cos_at, const u8* sin_at, int t) {
    UNROLL for (int j = 0; j < J; j++) {
      cos[j].load(cos_at + (32 * j + 8 * t) * TABLE_BYTES);
      sin[j].load(sin_at + (32 * j + 8 * t) * TABLE_BYTES);
    }
  }
};
// A row of 16 bits, of a thread's channels. The tables of a few tokens stay in the nearest cache for all heads.
DEVICE void load_row(Eight x[J], const u16* at, int t) {
  UNROLL for (int j = 0; j < J; j++) x[j].words = load_once(at + 32 * j + 8 * t);
}
// Of a row that comes next, the lines of 128 bytes.
DEVICE void prefetch_row(const u16* at, int t) {
  if (t < D / 64) prefetch(at + 64 * t);
}

// The weights in shared memory, FP32, ones where one side alone has some; threads meet before they are read.
DEVICE void share_weights(u32 at, const void* weight) {
#if WEIGHT_BYTES
  for (int i = threadIdx.x; i < D; i += THREADS)
    store_shared(at + i * 4, as_word(!weight ? 1.0f : WEIGHT_BYTES == 4 ? ((const float*)weight)[i] : from_16bit(((const u16*)weight)[i])));
#endif
}

// y, 16 bit in words of two channels, from x: z = x r w; a = z_a cos_a - z_b sin_a, b = z_b cos_b + z_a sin_b.
// Returns r, 1 / rms of the row.
DEVICE float prepare_row(const Eight x[J], u32 weights, float eps, const Table& table, u32 y[J][4]) {
  float z[J][8], r = 1;
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) z[j][c] = x[j].at(c);
#if NORM
  float squares[J];
  UNROLL for (int j = 0; j < J; j++) {
    squares[j] = 0;
    UNROLL for (int c = 0; c < 8; c++) squares[j] = fmaf(z[j][c], z[j][c], squares[j]);
  }
  UNROLL for (int j = 1; j < J; j++) squares[0] += squares[j];
  r = rsqrtf(over_row(squares[0]) * (1.0f / D) + eps);
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) z[j][c] *= r;
#endif
#if WEIGHT_BYTES
  UNROLL for (int j = 0; j < J; j++) {
    float w[8];
    const u32 at = weights + (32 * j + 8 * (threadIdx.x & 3)) * 4;
    load_shared4(w, at);
    load_shared4(w + 4, at + 16);
    UNROLL for (int c = 0; c < 8; c++) z[j][c] *= w[c];
  }
#endif
#if ROPE
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) {
    const int other_j = INTERLEAVED ? j : j + J / 2, other_c = INTERLEAVED ? c + 1 : c;
    if (INTERLEAVED ? c & 1 : j >= J / 2) continue;
    const float a = z[j][c], b = z[other_j][other_c];
    z[j][c] = a * table.cos[j].at(c) - b * table.sin[j].at(c);
    z[other_j][other_c] = b * table.cos[other_j].at(other_c) + a * table.sin[other_j].at(other_c);
  }
#endif
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int w = 0; w < 4; w++) y[j][w] = to_16bit(z[j][2 * w], z[j][2 * w + 1]);
  return r;
}
DEVICE float value_of(const u32* words, int c) { return from_16bit((u16)(c & 1 ? words[c >> 1] >> 16 : words[c >> 1])); }

// R's signs between channels 8 t + 2 h + b, h and b 0 or 1, as two second operands: -1 where their numbers have an odd
// number of ones in common. FP16: of that, whatever 16 bits are.
template <bool FP16 = false> struct Signs {
  u32 words[2][2];
  DEVICE Signs(Lane lane) {
    UNROLL for (int m = 0; m < 2; m++) UNROLL for (int h = 0; h < 2; h++) {
      float of_pair[2];
      UNROLL for (int b = 0; b < 2; b++) {
        int common = (8 * lane.t + 2 * h + b) & (8 * (lane.g >> 1) + 2 * m + (lane.g & 1));
        common ^= common >> 4;
        of_pair[b] = 0x6996 >> (common & 15) & 1 ? -1.0f : 1.0f;
      }
      words[m][h] = FP16 ? to_fp16(of_pair[0], of_pair[1]) : to_16bit(of_pair[0], of_pair[1]);
    }
  }
};
// A chunk's x, FP32, of y of two rows: the levels of R that are in a product with signs.
template <bool FP16> DEVICE void times_signs(const u32* y, const u32* other_y, const Signs<FP16>& signs, float* x, float* other_x) {
  UNROLL for (int e = 0; e < 2; e++) {
    const u32 a[4] = {y[2 * e], other_y[2 * e], y[2 * e + 1], other_y[2 * e + 1]};
    UNROLL for (int m = 0; m < 2; m++) {
      const float none[4] = {0, 0, 0, 0};
      float sums[4];
      if (FP16) mma_fp16(none, sums, a, signs.words[m][0], signs.words[m][1]);
      else mma_16bit(none, sums, a, signs.words[m][0], signs.words[m][1]);
      UNROLL for (int i = 0; i < 4; i++) (i < 2 ? x : other_x)[4 * e + 2 * m + (i & 1)] = sums[i];
    }
  }
}
// The levels between fours of a thread's channels.
DEVICE void add_fours(float x[2][J][8]) {
  UNROLL for (int bit = 1; bit < 2 * J; bit *= 2) UNROLL for (int i = 0; i < 2 * J; i++) UNROLL for (int n = 0; n < 2; n++) UNROLL for (int c = 0; c < 4; c++) {
    if (i & bit) continue;
    float &low = x[n][i >> 1][4 * (i & 1) + c], &high = x[n][(i | bit) >> 1][4 * ((i | bit) & 1) + c];
    const float sum = low + high, difference = low - high;
    low = sum;
    high = difference;
  }
}
// x = y R sqrt(D), FP32, or y where there is no rotation.
DEVICE void times_r(const u32 y[2][J][4], const Signs<>& signs, float x[2][J][8]) {
#if TURNED
  UNROLL for (int j = 0; j < J; j++) times_signs(y[0][j], y[1][j], signs, x[0][j], x[1][j]);
  add_fours(x);
#else
  UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) x[n][j][c] = value_of(y[n][j], c);
#endif
}

// Codes of a row; x / scale is rounded once more than IEEE division, by less than sums in another order.
DEVICE void store_codes(const float x[J][8], float inverse, i8* codes, int t) {
  UNROLL for (int j = 0; j < J; j++) {
    u32 word[2];
    UNROLL for (int w = 0; w < 2; w++)
      word[w] = pack(fmaf(x[j][4 * w], inverse, MAGIC_F), fmaf(x[j][4 * w + 1], inverse, MAGIC_F),
                     fmaf(x[j][4 * w + 2], inverse, MAGIC_F), fmaf(x[j][4 * w + 3], inverse, MAGIC_F));
    *(uint2*)(codes + 32 * j + 8 * t) = make_uint2(word[0], word[1]);
  }
}
