// Codes of Q of what projections wrote, and sums of the keys that K's mean is of; key_codes.cu has the codes of K.

constexpr int SLOTS = 8 * WARPS;  // tokens of a thread block
constexpr int STEP = 32, SAMPLED_AT = 64, SAMPLED_EVERY = 128, SAMPLED_FROM = 512;  // keys, of sagebwd.recipe
constexpr u32 WEIGHTS_AT = 0, ROW_AT = D * 4, SUMS_AT = ROW_AT + D * 4;
static_assert(THREADS >= D, "a thread has a channel of the sums");

// Sums of a chunk's keys of a head, channel by channel, the same times R, and how many they are.
DEVICE void sum_keys(const u16* k, i64 pitch, const u8* cos, const u8* sin, i64 table_pitch, float eps, bool sampled, int begin,
                     int end, float* sums, float* turned_sums, float* count) {
  const Lane lane;
  const int apart = sampled ? SAMPLED_EVERY : STEP;
  if (sampled) begin += SAMPLED_AT;
  const int all = end > begin ? (end - begin + apart - 1) / apart * STEP : 0;
  float total[J][8];
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) total[j][c] = 0;
#pragma unroll 1
  for (int first = 0; first < all; first += SLOTS) {
    Eight x[J];
    Table table;
    const int number = first + 8 * lane.warp + lane.g, asked = begin + number / STEP * apart + number % STEP;
    const bool there = number < all && asked < end;
    const int token = min(asked, end - 1);
    load_row(x, k + token * pitch, lane.t);
    if (ROPE) table.load(cos + token * table_pitch, sin + token * table_pitch, lane.t);
    u32 y[J][4];
    prepare_row(x, shared_base() + WEIGHTS_AT, eps, table, y);
    UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) total[j][c] += there ? value_of(y[j], c) : 0.0f;
  }
  const u32 base = shared_base();
  UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) {
    UNROLL for (int far = 4; far < 32; far *= 2) total[j][c] += from_lane_xor(total[j][c], far);
    if (lane.g == 0) store_shared(base + SUMS_AT + (lane.warp * D + 32 * j + 8 * lane.t + c) * 4, as_word(total[j][c]));
  }
  __syncthreads();
  const int channel = threadIdx.x;
  float sum = 0;
  if (channel < D) {
    for (int w = 0; w < WARPS; w++) sum += load_shared(base + SUMS_AT + (w * D + channel) * 4);
    sums[channel] = sum;
  }
#if TURNED
  for (int bit = 1; bit < D; bit *= 2) {
    if (channel < D) store_shared(base + ROW_AT + channel * 4, as_word(sum));
    __syncthreads();
    if (channel < D) sum = load_shared(base + ROW_AT + (channel ^ bit) * 4) + (channel & bit ? -sum : sum);
    __syncthreads();
  }
  if (channel < D) turned_sums[channel] = sum * ROOT;
#endif
  if (channel == 0) {
    int kept = 0;
    for (int at = begin; at < end; at += apart) kept += min(end - at, STEP);
    *count = (float)kept;
  }
}

// psi of rows of Q, a scale a row: a warp has 8 tokens, two heads at a time; packed sequences are one. Then
// (chunks, heads_k, D) sums of K's chunks, their products with R, and counts (chunks, heads_k); largest (heads_k) is set
// to 0. q, codes, k by their strides, cos and sin by bytes between sequences and tokens, which lie alike. sampled: K's
// mean is of a sample of sequences that are long enough. inverse_rms: 1 / rms of Q's rows.
KERNEL query_codes(const u16* q, i64 q_batch, i64 q_head, i64 q_token, i8* q_int8, i64 q_int8_batch, i64 q_int8_head, i64 q_int8_token,
                   float* q_scale, float* inverse_rms, const void* q_weight, const u8* q_cos, const u8* q_sin, i64 q_table_batch, i64 q_table_token,
                   i64 heads, i64 tokens, const u16* k, i64 k_batch, i64 k_head, i64 k_token, const void* k_weight, const u8* k_cos,
                   const u8* k_sin, i64 k_table_batch, i64 k_table_token, float* sums, float* turned_sums, float* counts, float* largest,
                   const int* cu_seqlens_k, i64 heads_k, i64 tokens_k, i64 chunk, i64 chunks, i64 all_heads_k, i64 sampled, float eps) {
  int program = blockIdx.x;
  const int of_keys = (int)(chunks * all_heads_k);
  if (program < of_keys) {  // they take longest
    const int of_head = program / (int)chunks, block = program % (int)chunks;
    const Place place(block, of_head, cu_seqlens_k, (int)tokens_k, (int)heads_k, (int)chunk);
    const int owner = place.owner, batch = place.batch, head = place.head;
    const Sequence keys(cu_seqlens_k, batch, (int)tokens_k);
    share_weights(shared_base() + WEIGHTS_AT, k_weight);
    __syncthreads();
    const i64 table = batch * k_table_batch + keys.start * k_table_token, at = block * all_heads_k + of_head;
    const int size = its_chunk(cu_seqlens_k, (int)chunk, keys.length);
    const int begin = min(place.number, (keys.length + size - 1) / size) * size;
    sum_keys(k + offset_of(k_batch, k_head, k_token, batch, head, keys.start), k_token, k_cos + table, k_sin + table, k_table_token, eps,
             sampled && keys.length >= SAMPLED_FROM, begin, min(begin + size, keys.length), sums + at * D, turned_sums + at * D, counts + at);
    if (place.number == 0 && threadIdx.x == 0) largest[owner] = 0;
    return;
  }
  program -= of_keys;
  const Lane lane;
  const int groups = ((int)heads + HEADS - 1) / HEADS, blocks = ((int)tokens + SLOTS - 1) / SLOTS;
  const int batch = program / (groups * blocks), asked = program / groups % blocks * SLOTS + 8 * lane.warp + lane.g;
  const int first = program % groups * HEADS, last = min(first + HEADS, (int)heads);
  const bool inside = asked < tokens;
  const int token = min(asked, (int)tokens - 1);
  for (int n = first; n < last; n++) prefetch_row(q + offset_of(q_batch, q_head, q_token, batch, n, token), lane.t);
  share_weights(shared_base() + WEIGHTS_AT, q_weight);
  const i64 angles = batch * q_table_batch + token * q_table_token;
  const Signs<> signs(lane);
  __syncthreads();
#pragma unroll 1
  for (int head = first; head < last; head += 2) {
    Eight x[2][J];
    const u16* at = q + offset_of(q_batch, q_head, q_token, batch, head, token);
    const i64 other = head + 1 < last ? q_head : 0;
    UNROLL for (int n = 0; n < 2; n++) load_row(x[n], at + n * other, lane.t);
    Table table;  // of every head anew, of the cache: its registers are the sums' later
    if (ROPE) table.load(q_cos + angles, q_sin + angles, lane.t);
    u32 y[2][J][4];
    float r[2], turned[2][J][8];
    UNROLL for (int n = 0; n < 2; n++) r[n] = prepare_row(x[n], shared_base() + WEIGHTS_AT, eps, table, y[n]);
    times_r(y, signs, turned);
    UNROLL for (int n = 0; n < 2; n++) {
      float amax = 0;
      UNROLL for (int j = 0; j < J; j++) UNROLL for (int c = 0; c < 8; c++) amax = max_nan(amax, fabsf(turned[n][j][c]));
      const float scale = psi_scale(largest_over_row(amax));
      if (!inside || head + n >= last) continue;
      store_codes(turned[n], reciprocal(scale), q_int8 + offset_of(q_int8_batch, q_int8_head, q_int8_token, batch, head + n, token), lane.t);
      const i64 row = ((i64)batch * heads + head + n) * tokens + token;
      if (lane.t == 0) {
        q_scale[row] = TURNED ? scale * ROOT : scale;
        if (NORM) inverse_rms[row] = r[n];
      }
    }
  }
}
