// CUDA C++ on a CPU: the threads of a block are fibers, which wait for one another at products of a
// warp and at barriers. Copies are done when they are waited for, so waits and barriers that are missing show.
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct float2 { float x, y; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { int x; };
#define DEVICE inline
#define KERNEL static void
#define UNROLL
#define INF ((float)INFINITY)

static const int MOST_THREADS = 1024;
static u8 shared_memory[256 << 10];
static Index threadIdx, blockIdx, gridDim;
// A context begins a fiber; from then on jumps change fibers, as they need no system call.
static ucontext_t fibers[MOST_THREADS];
static jmp_buf scheduler, places[MOST_THREADS];
static bool begun[MOST_THREADS], ended[MOST_THREADS];
static int block_threads;

// A place where a group of threads meets, and what each brought there: in turns, as some still read what they saw last.
struct Meeting { int count, round; u32 brought[2][32][16]; };
static Meeting warps[MOST_THREADS / 32], pairs[MOST_THREADS / 64], whole;

static void step_aside() {
  const int me = threadIdx.x;
  if (!_setjmp(places[me])) _longjmp(scheduler, 1);
  threadIdx.x = me;
}
static void meet(Meeting& at, int members) {
  const int round = at.round;
  if (++at.count == members) { at.count = 0; at.round++; return; }
  while (at.round == round) step_aside();
}
static Meeting& own_warp() { return warps[threadIdx.x / 32]; }
static int lane_of_thread() { return threadIdx.x & 31; }
// Bring some words and see everybody's, until the meeting after the next.
static u32 (*bring(const u32* x, int words))[16] {
  Meeting& warp = own_warp();
  u32 (*brought)[16] = warp.brought[warp.round & 1];
  memcpy(brought[lane_of_thread()], x, words * 4);
  meet(warp, 32);
  return brought;
}
static void __syncthreads() { meet(whole, block_threads); }
static void wait_for_pair(int pair) { meet(pairs[pair], 64); }

template <class T> static T max(T a, T b) { return a > b ? a : b; }
template <class T> static T min(T a, T b) { return a < b ? a : b; }
static float as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static u32 as_word(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float exp2_of(float x) { return x < -126 ? 0.0f : exp2f(x); }
static float log2_of(float x) { return log2f(x); }
static float reciprocal(float x) { return 1.0f / x; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float max_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static void fence() {}
template <class T> static T opaque(T x) { return x; }
static void four_opaque(int* y, int x) { y[0] = y[1] = y[2] = y[3] = x; }
static float2 make_float2(float x, float y) { float2 z = {x, y}; return z; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static u32 from_lane_xor_word(u32 x, int mask) {
  return bring(&x, 1)[lane_of_thread() ^ mask][0];
}
static float from_lane_xor(float x, int mask) { return as_float(from_lane_xor_word(as_word(x), mask)); }
static int from_lane_xor(int x, int mask) { return (int)from_lane_xor_word((u32)x, mask); }
static bool __any_sync(u32, bool x) {
  const u32 given = x;
  u32 (*all)[16] = bring(&given, 1), found = 0;
  for (int i = 0; i < 32; i++) found |= all[i][0];
  return found != 0;
}
static u32 __ballot_sync(u32, bool x) {
  const u32 given = x;
  u32 (*all)[16] = bring(&given, 1), found = 0;
  for (int i = 0; i < 32; i++) found |= all[i][0] << i;
  return found;
}
static int __popc(u32 x) { return __builtin_popcount(x); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 y = 0;
  for (int i = 0; i < 4; i++) y |= (u32)(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return y;
}
static int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int)(i8)(a >> 8 * i) * (int)(i8)(b >> 8 * i);
  return c;
}

static float fp16_of(u32 two, int n) { const u16 x = (u16)(two >> 16 * n); _Float16 y; memcpy(&y, &x, 2); return (float)y; }
static float from_16bit(u16 x) {
#if HALF
  return fp16_of(x, 0);
#else
  return as_float((u32)x << 16);
#endif
}
static u16 to_16bit(float x) {
#if HALF
  _Float16 y = (_Float16)x;
  u16 z;
  memcpy(&z, &y, 2);
  return z;
#else
  u32 y = as_word(x);
  return x != x ? 0x7fff : (u16)((y + 0x7fff + (y >> 16 & 1)) >> 16);
#endif
}
static u32 to_16bit(float low, float high) { return to_16bit(low) | (u32)to_16bit(high) << 16; }

static u32 chosen_of_two(u32 a, u32 b, bool larger) {
  u32 y = 0;
  for (int n = 0; n < 2; n++) {
    const u16 one = (u16)(a >> 16 * n), other = (u16)(b >> 16 * n);
    const float p = from_16bit(one), q = from_16bit(other);
    y |= (u32)(p != p || q != q ? 0x7fff : (larger ? p > q : p < q) ? one : other) << 16 * n;
  }
  return y;
}
static u32 max_two(u32 a, u32 b) { return chosen_of_two(a, b, true); }
static u32 min_two(u32 a, u32 b) { return chosen_of_two(a, b, false); }

static float from_fp16(u16 x) { return fp16_of(x, 0); }
static u32 to_fp16(float low, float high) {
  const _Float16 two[2] = {(_Float16)low, (_Float16)high};
  u32 y;
  memcpy(&y, two, 4);
  return y;
}
static u32 add_fp16(u32 a, u32 b) { return to_fp16(fp16_of(a, 0) + fp16_of(b, 0), fp16_of(a, 1) + fp16_of(b, 1)); }

// A product's fragments: row g or g + 8 of A, column g of B; four bytes, or two numbers of 16 bits, from 4 t or 2 t on.
template <class Number, int K> static void product(Number* c, const u32* a, u32 b0, u32 b1, Number (*read)(u32, int)) {
  static Number brought[MOST_THREADS / 32][2][24][K];  // rows of A, then columns of B, by warp and turn
  Number (*rows)[K] = brought[threadIdx.x / 32][own_warp().round & 1];
  const u32 given[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const int g = lane_of_thread() >> 2, t = lane_of_thread() & 3, per = K / 8;  // numbers a word
  for (int i = 0; i < 6; i++) for (int n = 0; n < per; n++) {
    const int row = g + (i < 4 ? i & 1 : 2) * 8, half = i < 4 ? i >> 1 : i & 1;
    rows[row][half * (K / 2) + t * per + n] = read(given[i], n);
  }
  meet(own_warp(), 32);
  for (int r = 0; r < 4; r++) for (int k = 0; k < K; k++) c[r] += rows[g + (r >> 1) * 8][k] * rows[16 + 2 * t + (r & 1)][k];
}
static int code_of(u32 four, int n) { return (i8)(four >> 8 * n); }
static float of_16bit(u32 two, int n) { return from_16bit((u16)(two >> 16 * n)); }
static void mma(int* c, const u32* a, u32 b0, u32 b1) { product<int, 32>(c, a, b0, b1, code_of); }
static void mma(const int* start, bool first, int* c, const u32* a, u32 b0, u32 b1) {
  if (first) for (int r = 0; r < 4; r++) c[r] = start[r];
  mma(c, a, b0, b1);
}
static void mma_16bit(float* c, const u32* a, u32 b0, u32 b1) { product<float, 16>(c, a, b0, b1, of_16bit); }
static void mma_16bit(const float* start, float* c, const u32* a, u32 b0, u32 b1) {
  for (int r = 0; r < 4; r++) c[r] = start[r];
  mma_16bit(c, a, b0, b1);
}
static void mma_fp16(const float* start, float* c, const u32* a, u32 b0, u32 b1) {
  for (int r = 0; r < 4; r++) c[r] = start[r];
  product<float, 16>(c, a, b0, b1, fp16_of);
}

static void add_rows(float* c, const u32* a) {
  u32 (*all)[16] = bring(a, 4);
  for (int r = 0; r < 4; r++) for (int lane = 0; lane < 4; lane++) for (int n = 0; n < 4; n++)
    c[r] += fp16_of(all[(lane_of_thread() & ~3) + lane][(r >> 1) + (n & 2)], n & 1);
}

static u32 shared_base() { return 0; }
// Lane 8 i + r has the address of row r of matrix i; lane 4 r + w gets its w-th word, transposed its rows 2 w and 2 w + 1.
static void load_matrices_as(u32* out, u32 at, bool transposed) {
  u32 (*all)[16] = bring(&at, 1);
  const int row = lane_of_thread() >> 2, w = lane_of_thread() & 3;
  for (int i = 0; i < 4; i++) {
    if (!transposed) { memcpy(&out[i], shared_memory + all[i * 8 + row][0] + w * 4, 4); continue; }
    u16 pair[2];
    for (int b = 0; b < 2; b++) memcpy(&pair[b], shared_memory + all[i * 8 + 2 * w + b][0] + row * 2, 2);
    memcpy(&out[i], pair, 4);
  }
  meet(own_warp(), 32);  // a warp reads its rows at once: none writes before
}
static void load_matrices(u32* out, u32 at) { load_matrices_as(out, at, false); }
static void load_matrices_transposed(u32* out, u32 at) { load_matrices_as(out, at, true); }
static float load_shared(u32 at) { float x; memcpy(&x, shared_memory + at, 4); return x; }
static void load_shared2(float* x, u32 at) { memcpy(x, shared_memory + at, 8); }
static void load_shared4(float* x, u32 at) { memcpy(x, shared_memory + at, 16); }
static void store_shared(u32 at, u32 x) { memcpy(shared_memory + at, &x, 4); }
static void store_shared4(u32 at, const u32* x) { memcpy(shared_memory + at, x, 16); }
static void max_shared(u32 at, float x) {
  const u32 now = as_word(load_shared(at));
  if (as_word(x) > now) store_shared(at, as_word(x));
}
static void add_global(float* p, float x) { *p += x; }
static void max_global(float* p, float x) { if (as_word(x) > as_word(*p)) *p = x; }
static void load_words4(u32* x, u32 at) { memcpy(x, shared_memory + at, 16); }
static void add_global4(float* p, float a, float b, float c, float d) { p[0] += a; p[1] += b; p[2] += c; p[3] += d; }
// Copies of a thread that are under way, in their order. Their places are NaN until the thread waits for their group.
struct Copy { u32 to; const void* from; bool there; int group; };
static const int MOST_COPIES = 1024;
struct Copies { Copy of[MOST_COPIES]; int begin, end, group; };
static Copies copies[MOST_THREADS];
static void copy16(u32 to, const void* from, bool there) {
  Copies& own = copies[threadIdx.x];
  if (own.end - own.begin == MOST_COPIES) abort();
  own.of[own.end++ % MOST_COPIES] = {to, from, there, own.group};
  memset(shared_memory + to, 255, 16);
}
static uint4 load_once(const void* at) { return *(const uint4*)at; }
static void prefetch(const void*) {}
static void commit_copies() { copies[threadIdx.x].group++; }
template <int N> static void wait_for_copies() {
  Copies& own = copies[threadIdx.x];
  for (; own.begin < own.end && own.of[own.begin % MOST_COPIES].group < own.group - N; own.begin++) {
    const Copy& one = own.of[own.begin % MOST_COPIES];
    if (one.there) memcpy(shared_memory + one.to, one.from, 16);
    else memset(shared_memory + one.to, 0, 16);
  }
}

static void call_kernel(void** arguments);  // what the test writes behind the kernel's source
static void** given_arguments;
static void fiber() {
  call_kernel(given_arguments);
  ended[threadIdx.x] = true;
  _longjmp(scheduler, 1);
}
extern "C" void run(int blocks, int threads, void** arguments) {
  const size_t room = 256 << 10;
  u8* stacks = (u8*)malloc(room * threads);
  given_arguments = arguments;
  block_threads = threads;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(shared_memory, 255, sizeof(shared_memory));  // NaN
    memset(warps, 0, sizeof(warps));
    memset(pairs, 0, sizeof(pairs));
    memset(&whole, 0, sizeof(whole));
    for (int i = 0; i < threads; i++) {
      begun[i] = ended[i] = false;
      copies[i].begin = copies[i].end = copies[i].group = 0;
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks + room * i;
      fibers[i].uc_stack.ss_size = room;
      makecontext(&fibers[i], fiber, 0);
    }
    for (int left = threads; left;) {
      left = 0;
      for (int i = 0; i < threads; i++) {
        if (ended[i]) continue;
        threadIdx.x = i;
        if (!_setjmp(scheduler)) {
          if (begun[i]) _longjmp(places[i], 1);
          begun[i] = true;
          setcontext(&fibers[i]);
        }
        left += !ended[i];
      }
    }
  }
  free(stacks);
}
