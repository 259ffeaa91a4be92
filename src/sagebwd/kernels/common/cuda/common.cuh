// What kernels of CUDA C++ share: instructions in PTX, tiles in shared memory, INT8 sums that read as floats.
// No includes: NVRTC compiles a kernel of this file and its own as they are.
// Macros of a variant: D, channels (64 or 128); WARPS and MT, tiles of 16 rows a warp; CTAS, thread blocks that a
// multiprocessor holds; HALF, 1 where 16 bits are FP16 and not BF16; TURNED, channels of a rotation, or 0. Of forward:
// STAGES, SPLIT, and PRODUCT_SUMS, of P's rows; and of codes: FIRST. Of backward: K_IN_REGISTERS; INT8_DP, a product of
// codes, as of row_values; ADDS_FOUR numbers to dQ at a time, as of finish.

#ifndef EMULATED  // by tests/kernels/emulated_cuda.h, which has its own of all up to its end
typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS)
#define UNROLL _Pragma("unroll")

#define INF __int_as_float(0x7f800000)

extern __shared__ __align__(1024) u8 shared_memory[];

// ---- registers ----

DEVICE float as_float(int x) { return __int_as_float(x); }
DEVICE u32 as_word(float x) { return __float_as_uint(x); }
DEVICE float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_of(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// The larger number, or NaN where either is.
DEVICE float max_nan(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
// Loads do not move across: what is to be multiplied later takes no registers yet.
DEVICE void fence() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
DEVICE float from_lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE int from_lane_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// Of 64 bits, of which the compiler knows nothing: it keeps no sums with it in registers.
template <class T> DEVICE T opaque(T x) { asm volatile("" : "+l"(x)); return x; }

// x in four registers that are none of each other's to ptxas, so that it copies no constant for every product: blocks and
// grids have one dimension, which it does not know.
DEVICE void four_opaque(int* y, int x) {
  asm volatile("{ .reg .b32 t; mov.u32 t, %%tid.y; add.s32 %0, t, %4; mov.u32 t, %%tid.z; add.s32 %1, t, %4;"
               " mov.u32 t, %%ctaid.y; add.s32 %2, t, %4; mov.u32 t, %%ctaid.z; add.s32 %3, t, %4; }"
               : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "r"(x));
}

#if HALF
#define OF_16BIT "f16"
#else
#define OF_16BIT "bf16"
#endif
// Two numbers of 16 bits.
DEVICE u32 to_16bit(float low, float high) { u32 y; asm("cvt.rn." OF_16BIT "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
DEVICE float from_16bit(u16 x) {
#if HALF
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  return as_float((u32)x << 16);
#endif
}

// Two FP16 numbers, one in FP32, and sums of two and two.
DEVICE u32 to_fp16(float low, float high) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
DEVICE float from_fp16(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
DEVICE u32 add_fp16(u32 a, u32 b) { u32 y; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }

// Of two numbers of 16 bits each the larger and the smaller, or NaN where either is.
DEVICE u32 max_two(u32 a, u32 b) { u32 y; asm("max.NaN." OF_16BIT "x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
DEVICE u32 min_two(u32 a, u32 b) { u32 y; asm("min.NaN." OF_16BIT "x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }

// ---- products ----

// c += a b, (16 x 32) (32 x 8) INT8.
DEVICE void mma(int* c, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c = start + a b where it is the first, else c += a b.
DEVICE void mma(const int* start, bool first, int* c, const u32* a, u32 b0, u32 b1) {
  if (!first) { mma(c, a, b0, b1); return; }
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}
#define MMA_16(NAME, OF) /* c = start + a b, (16 x 16) (16 x 8) of 16 bits */ \
  DEVICE void NAME(const float* start, float* c, const u32* a, u32 b0, u32 b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OF "." OF ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3])); \
  }
MMA_16(mma_16bit, OF_16BIT)
MMA_16(mma_fp16, "f16")  // whatever 16 bits are
// c += a b.
DEVICE void mma_16bit(float* c, const u32* a, u32 b0, u32 b1) { mma_16bit(c, c, a, b0, b1); }

// Rows of a, (16 x 16) FP16, are added up: all lanes of a quad get rows g in c[0] and g + 8 in c[2].
DEVICE void add_rows(float* c, const u32* a) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(0x3C003C00));
}

// ---- shared and global memory ----

DEVICE u32 shared_base() { return (u32)__cvta_generic_to_shared(shared_memory); }
DEVICE void load_matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE void load_matrices_transposed(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE float load_shared(u32 at) { float r; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory"); return r; }
DEVICE void load_shared2(float* r, u32 at) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r[0]), "=f"(r[1]) : "r"(at) : "memory");
}
DEVICE void load_shared4(float* r, u32 at) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]) : "r"(at) : "memory");
}
DEVICE void store_shared(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(x) : "memory"); }
DEVICE void store_shared4(u32 at, const u32* x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// Of numbers that are not negative; NaN wins.
DEVICE void max_shared(u32 at, float x) { asm volatile("red.shared.max.u32 [%0], %1;" :: "r"(at), "r"(as_word(x)) : "memory"); }
DEVICE void add_global(float* p, float x) { asm volatile("red.global.add.f32 [%0], %1;" :: "l"(p), "f"(x) : "memory"); }
// Of numbers that are not negative; NaN wins.
DEVICE void max_global(float* p, float x) { asm volatile("red.global.max.u32 [%0], %1;" :: "l"(p), "r"(as_word(x)) : "memory"); }
DEVICE void load_words4(u32* r, u32 at) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
#if ADDS_FOUR  // of compute capability 9.0 and more
DEVICE void add_global4(float* p, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" :: "l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
#endif

// 16 bytes that are read once.
DEVICE uint4 load_once(const void* at) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
  return x;
}
// A line that is going to be loaded.
DEVICE void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }
// 16 bytes, zeros where they are not there.
DEVICE void copy16(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until both warps of a pair are here.
DEVICE void wait_for_pair(int pair) { asm volatile("bar.sync %0, 64;" :: "r"(pair + 1) : "memory"); }
// Until at most N groups of copies are under way.
template <int N> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

#endif  // EMULATED

constexpr int THREADS = WARPS * 32;
// Tiles of 8 columns at a time, so that no product waits for the one before it.
constexpr int PAIR = 2;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
// An INT32 sum that starts from this reads as the float 1.5 2^23 + sum, without a conversion. |sum| < 2^22.
constexpr int MAGIC = 0x4B400000;
constexpr float MAGIC_F = 12582912.0f;
constexpr float TINY = 0x1p-119f;  // of sagebwd.reference.quantize
constexpr float ROUNDING = 0x1p-18f;  // of kernels/common/rotation.py
constexpr u32 TWO_INF = HALF ? 0x7C007C00 : 0x7F807F80;  // of 16 bits

// ---- registers ----

// x without its last two bits, so that MAGIC_F x is exact.
DEVICE float rounded_down(float x) { return as_float(as_word(x) & ~3u); }

// Codes, the low bytes of four numbers MAGIC_F + code.
DEVICE u32 pack(float a, float b, float c, float d) {
  return __byte_perm(__byte_perm(as_word(a), as_word(b), 0x0040), __byte_perm(as_word(c), as_word(d), 0x0040), 0x5410);
}

// Of the four lanes that share a row, the sum and the largest.
DEVICE float over_row(float x) {
  x += from_lane_xor(x, 1);
  return x + from_lane_xor(x, 2);
}
DEVICE float largest_over_row(float x) {
  x = max_nan(x, from_lane_xor(x, 1));
  return max_nan(x, from_lane_xor(x, 2));
}

// ---- codes ----

// x / scale as IEEE division rounds it; inverse is 1 / scale within two units in the last place.
DEVICE float divide(float x, float scale, float inverse) {
  const float quotient = x * inverse;
  return fmaf(fmaf(quotient, -scale, x), inverse, quotient);
}
// psi's scale: amax / 127, NaN of infinity, 1 under TINY.
DEVICE float psi_scale(float amax) { return amax < TINY ? 1.0f : divide(amax + 0.0f * amax, 127.0f, 1.0f / 127.0f); }
// MAGIC_F + code, whose low byte is the code.
DEVICE float coded(float x, float scale, float inverse) { return divide(x, scale, inverse) + MAGIC_F; }

// 8 numbers of 16 bits.
struct Eight {
  uint4 words;
  DEVICE float at(int c) const {
    const u32 word = c < 2 ? words.x : c < 4 ? words.y : c < 6 ? words.z : words.w;
    return from_16bit((u16)(c & 1 ? word >> 16 : word));
  }
};
DEVICE Eight load_eight(const u16* at, bool there) {
  Eight x = {{0, 0, 0, 0}};
  if (there) x.words = *(const uint4*)at;
  return x;
}

// ---- tiles ----

// 2 WIDTH maxima in each of two lanes that differ in BIT: each keeps WIDTH of them.
template <int WIDTH, int BIT> DEVICE void fold(float* x, int lane) {
  UNROLL for (int i = 0; i < WIDTH; i++) {
    const float low = x[i], high = x[i + WIDTH];
    x[i] = max_nan(lane & BIT ? high : low, from_lane_xor(lane & BIT ? low : high, BIT));
  }
}

// Byte of a 16-byte chunk of a row of BYTES, so that 8 rows of one chunk lie in 32 banks.
template <int BYTES> DEVICE u32 swizzled(u32 row, u32 chunk) {
  return row * BYTES + ((chunk ^ (BYTES == 64 ? (row >> 1) & 3 : row & 7)) << 4);
}
// Rows of 16 in which a thread's two rows of a product, g and g + 8, are tokens side by side: pairs of them lie in
// the transposed copies' order (`interleave_rows` in kernels/common/tile.py).
DEVICE int paired(int row) { return (row & ~15) + (row & 8 ? 1 : 0) + (row & 1 ? (row & 7) + 7 : row & 7); }

// Copy a tile (ROWS_OF x BYTES) whose rows lie `pitch` bytes apart; zeros from row `left` on, and where `mask`, a byte a
// row, is 0. PAIRED: row r is token paired(r).
template <int ROWS_OF, int BYTES, bool PAIRED = false>
DEVICE void copy_tile(u32 to, const void* from, i64 pitch, int left, const u8* mask = nullptr) {
  constexpr int CHUNKS = BYTES / 16, TURN = THREADS / CHUNKS;  // rows that all threads copy at a time
  static_assert(TURN % 8 == 0 && ROWS_OF % TURN == 0, "the swizzle is every turn's");
  const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  to += swizzled<BYTES>(row, chunk);
  const u8* at = (const u8*)from + chunk * 16;
  UNROLL for (int i = 0; i < ROWS_OF / TURN; i++) {
    const int token = PAIRED ? paired(row + i * TURN) : row + i * TURN;
    copy16(to + i * TURN * BYTES, at + token * pitch, token < left && (!mask || mask[token]));
  }
}
template <int BYTES> DEVICE void copy_flat(u32 to, const void* from) {
  UNROLL for (int i = 0; i < (BYTES / 16 + THREADS - 1) / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at < BYTES / 16) copy16(to + at * 16, (const u8*)from + at * 16, true);
  }
}

// ---- the rotation R ----

// Of a channel all bits up to that of its block's size in R; 0 behind the last block. TURNED: channels that R is of.
DEVICE constexpr int span_of(int channel) {
  if (TURNED == D) return 2 * D - 1;
  int span = channel < TURNED ? channel ^ TURNED : 0;
  span |= span >> 1;
  span |= span >> 2;
  span |= span >> 4;
  return span;
}
DEVICE float factor_of(int channel) {  // 1 over the root of the block's size
  const int span = span_of(channel), bits = (as_word((float)max(span - (span >> 1), 1)) >> 23) - 127;
  return as_float((127 - bits / 2) << 23) * (bits & 1 ? 0.70710678118654752f : 1.0f);
}
// Four lanes share a row: number i of lane t is of this channel, WIDTH of them side by side.
template <int WIDTH> DEVICE int channel_of(int i, int t) { return i / WIDTH * (4 * WIDTH) + WIDTH * t + i % WIDTH; }
// x R of such a row, but for its factors.
template <int WIDTH> DEVICE void turn(float* x, int t) {
  UNROLL for (int bit = 1; bit < D; bit *= 2) UNROLL for (int i = 0; i < D / 4; i++) {
    const bool turned = TURNED == D || span_of(channel_of<WIDTH>(i, t)) >> 1 & bit;
    const int far = bit < WIDTH ? bit : bit / 4;  // of two numbers of a lane
    if (bit == WIDTH || bit == 2 * WIDTH) {
      const float other = from_lane_xor(x[i], bit / WIDTH);
      if (turned) x[i] = fmaf(x[i], WIDTH * t & bit ? -1.0f : 1.0f, other);
    } else if (!(i & far)) {
      const float sum = x[i] + x[i | far], difference = x[i] - x[i | far];
      if (turned) { x[i] = sum; x[i | far] = difference; }
    }
  }
}

// ---- gradients ----

// x R scale of a row of which lane t of four has channels 8 n + 2 t + b at 2 n + b, as a product's rows lie.
DEVICE void turn_back(float* x, float scale, int t) {
  if (TURNED) turn<2>(x, t);
  UNROLL for (int i = 0; i < D / 4; i++) x[i] *= TURNED ? factor_of(channel_of<2>(i, t)) * scale : scale;
}
// The same row in 16 bits, where it is inside: lanes exchange words, so that each writes 16 bytes.
DEVICE void store_row(u16* row, bool inside, const float* x, int t) {
  UNROLL for (int j = 0; j < D / 32; j++) {
    u32 w[4];
    UNROLL for (int n = 0; n < 4; n++) w[n] = to_16bit(x[8 * j + 2 * n], x[8 * j + 2 * n + 1]);
    UNROLL for (int bit = 1; bit < 4; bit *= 2) UNROLL for (int n = 0; n < 4; n++) if (!(n & bit)) {
      const u32 other = (u32)from_lane_xor((int)(t & bit ? w[n] : w[n | bit]), bit);
      (t & bit ? w[n] : w[n | bit]) = other;
    }
    if (inside) *(uint4*)(row + 32 * j + 8 * t) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// ---- the call ----

// Elements before a token of a tensor (batch, heads, tokens, D), by those between its sequences, heads and tokens.
DEVICE i64 offset_of(i64 batch, i64 head, i64 token, i64 b, i64 h, i64 t) { return b * batch + h * head + t * token; }

// A sequence of a head: its first token, its length, and where it begins in values by token and in padded blocks.
struct Sequence {
  int start, length;
  DEVICE Sequence(const int* cu_seqlens, int batch, int tokens) {
    start = cu_seqlens ? cu_seqlens[batch] : 0;
    length = cu_seqlens ? cu_seqlens[batch + 1] - start : tokens;
  }
  // The block at which it begins in a padded layout (`padded_block` in kernels/common/tile.py).
  DEVICE int padded(const int* cu_seqlens, int batch, int block) const { return cu_seqlens ? start / block + batch : 0; }
};

// The sequence that has a block of a padded layout (`owner_of` in kernels/common/tile.py). A warp searches.
DEVICE int owner_of(const int* cu_seqlens, int sequences, int block, int size) {
  const int lane = threadIdx.x & 31;
  int found = 0;
  for (int left = sequences; left > 1;) {
    const int step = (left + 31) / 32, at = found + lane * step;
    const bool begun = at < sequences && cu_seqlens[at] / size + at <= block;
    found += (__popc(__ballot_sync(0xffffffffu, begun)) - 1) * step;
    left = step;
  }
  return found;
}

// A block of tokens of a head: its number in its sequence, which may be past the end, and the head over all sequences.
struct Place {
  int number, batch, head, owner;
  // block: of a head's, of a padded layout where there are cu_seqlens; tokens: then how many sequences.
  DEVICE Place(int block, int of_head, const int* cu_seqlens, int tokens, int heads, int size) {
    if (cu_seqlens) {
      batch = owner_of(cu_seqlens, tokens, block, size);
      number = block - cu_seqlens[batch] / size - batch;
      head = of_head;
      owner = batch * heads + head;
    } else {
      number = block;
      owner = of_head;
      batch = owner / heads;
      head = owner % heads;
    }
  }
};
