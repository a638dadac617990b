// A whole decoder pass of the Llama family for CPUs with AVX-512 VNNI and BF16, called through ctypes.
//
// Every output of a product is summed by one thread in one order, whatever the rows beside it, and attention sums
// over keys by their order in the text. So a row has the same bits in every pass: alone, in a verify block, in a tree,
// in a prompt chunk, beside other sequences. Nothing is padded for it.
//
// A weight [n, k] lies in blocks of 16 outputs, k running fastest between them, so that a pass reads it once and in
// order. Activations are bfloat16 beside bfloat16 weights, and int8 with a scale for every 32 of them beside int8
// (a scale for every 32) and int4 weights (a scale and a minimum for every 32); their sums are whole numbers.
// The residual stream is float32. Keys and values are bfloat16.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int LANES = 16;   // outputs of a block
constexpr int GROUP = 32;   // activations, and int4 weights, under one scale
constexpr int TILE = 16;    // rows computed together, of bfloat16; half as many of int8 and int4
constexpr int QUERIES = 64; // of an attention task at most
constexpr int KEYS = 16;    // keys looked at together
constexpr int TOGETHER = 8; // queries looked at together, or half as many
constexpr int AHEAD = 4096; // bytes of weights fetched before they are used

// -- threads ---------------------------------------------------------------------------------------------------

// Threads are PyTorch's own: two pools on the same cores would spin against each other.
inline void barrier() {
#pragma omp barrier
}

// Memory that grows, never shrinks, and is not kept when it does.
template <class T>
struct Scratch {
  T* data = nullptr;
  size_t held = 0;
  T* of(size_t count) {
    if (count > held) {
      std::free(data);
      held = count + count / 4 + 64;
      data = static_cast<T*>(std::aligned_alloc(64, (held * sizeof(T) + 63) / 64 * 64));
      if (data == nullptr) std::abort();
    }
    return data;
  }
  ~Scratch() { std::free(data); }
};

// -- small vector functions ------------------------------------------------------------------------------------

inline __m512 exp_of(__m512 x) {  // Cephes' expf: relative error below 2^-22
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline __m512 silu(__m512 x) {
  __m512 low = exp_of(_mm512_sub_ps(_mm512_setzero_ps(), x));
  __m512 y = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), low));
  __mmask16 strange = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(y, strange, x);
}

inline void store_bf16(uint16_t* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

inline __m512 load_bf16(const uint16_t* from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __m512i broadcast4(const void* from) {
  int32_t value;
  std::memcpy(&value, from, 4);
  return _mm512_set1_epi32(value);
}

// -- weights and activations -----------------------------------------------------------------------------------

enum Kind : int32_t { BF16 = 0, INT8 = 1, INT4 = 2 };

constexpr int INT4_GROUP_BYTES = GROUP * LANES / 2 + 2 * LANES * 2;  // nibbles, then scales and minima in float16

size_t block_bytes(int kind, int k) {
  if (kind == BF16) return size_t(k) * LANES * 2;
  if (kind == INT8) return size_t(k) * LANES;
  return size_t(k / GROUP) * INT4_GROUP_BYTES;
}

}  // namespace

extern "C" {

struct Product {
  int32_t kind, n, k, blocks;  // blocks of 16 outputs; the last may be padded
  const uint8_t* weight;
  const uint16_t* scale;  // [blocks, k / 32, 16] float16, of int8 alone
  const float* bias;      // [blocks * 16] or null
};

struct Layer {
  const float *input_norm, *mlp_norm;  // [hidden]
  const float *query_norm, *key_norm;  // [head_dim] or null
  Product qkv, out, gate_up, down;     // blocks of gate and of up take turns
};

struct Shape {
  int32_t layers, hidden, heads, kv_heads, head_dim, inner, vocab, rotary;
  float eps, attention_scale;
};

// One pass. A task is a row, or neighbouring rows, of one sequence in attention.
struct Pass {
  int32_t rows, layers, tasks, wanted_rows, keys_only, tap_count;
  const int64_t* ids;       // [rows]
  const int32_t* turns;     // [rows] row of the rotation tables
  const int32_t* slots;     // [rows]
  const int32_t* places;    // [rows] where keys and values go in the slot
  const int32_t* task_row;  // [tasks + 1] first row; the rows of a task share a slot
  const int32_t* seen;      // [rows] keys seen in place order: all before this one
  const int32_t* tail_from; // [rows + 1] further keys of a row: tails[tail_from[r]] .. tails[tail_from[r + 1]]
  const int32_t* tails;     // their places, in the order of the text
  const int32_t* wanted;    // [wanted_rows] rows whose logits to compute
  const int32_t* taps;      // [tap_count] layers whose output to keep; the number of layers: after the norm
  float* const* tap_out;    // [tap_count] [rows, hidden]
  const float *cosines, *sines;  // [positions, rotary / 2]
  uint16_t* const* caches;       // by layer: [2, slots, kv_heads, capacity, head_dim]
  int64_t capacity, cache_slots;
  float* logits;            // [wanted_rows, vocab]
};
}

namespace {

// Activations as a product reads them.
struct Activations {
  int kind = BF16, k = 0;
  uint16_t* bf16 = nullptr;  // [rows, k]
  int8_t* whole = nullptr;   // [rows, k]
  float* scale = nullptr;    // [rows, k / 32]
  int32_t* offset = nullptr; // [rows, k / 32] -128 * their sum, of int8
  float* sum = nullptr;      // [rows, k / 32] scale * their sum, of int4
  Scratch<uint16_t> bf16_memory;
  Scratch<int8_t> whole_memory;
  Scratch<float> scale_memory, sum_memory;
  Scratch<int32_t> offset_memory;

  void reserve(int rows, const Product& reader) {
    kind = reader.kind, k = reader.k;
    size_t groups = size_t(rows) * (k / GROUP);
    if (kind == BF16) {
      bf16 = bf16_memory.of(size_t(rows) * k);
      return;
    }
    whole = whole_memory.of(size_t(rows) * k);
    scale = scale_memory.of(groups);
    offset = offset_memory.of(groups);
    sum = sum_memory.of(groups);
  }

  // Put 32 neighbouring values of a row.
  inline void put(int row, int at, __m512 low, __m512 high) {
    if (kind == BF16) {
      store_bf16(bf16 + size_t(row) * k + at, low);
      store_bf16(bf16 + size_t(row) * k + at + LANES, high);
      return;
    }
    size_t group = size_t(row) * (k / GROUP) + at / GROUP;
    __m512 most = _mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high));
    float step = _mm512_reduce_max_ps(most) / 127.0f;
    __m512 inverse = _mm512_set1_ps(step > 0.0f ? 1.0f / step : 0.0f);
    __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    int8_t* to = whole + size_t(row) * k + at;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + LANES), _mm512_cvtsepi32_epi8(b));
    __mmask16 strange = _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q);
    if (strange) step = __builtin_nanf("");  // what is no number must stay none
    int total = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
    scale[group] = step;
    offset[group] = -128 * total;
    sum[group] = step * float(total);
  }
};

// -- products: B neighbouring blocks of 16 outputs, R rows ----------------------------------------------------------

template <int R, int B>
inline void int8_tile(const Product& p, int block, const Activations& a, int row, __m512 (*out)[TILE]) {
  const int k = p.k, groups = k / GROUP;
  const size_t apart = block_bytes(INT8, k);
  const uint8_t* w = p.weight + block * apart;
  const int8_t* x = a.whole + size_t(row) * k;
  const float* scale = a.scale + size_t(row) * groups;
  const int32_t* offset = a.offset + size_t(row) * groups;
  __m512 sums[B][R];
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) sums[b][r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; g++, w += 512) {
    __m512i whole[B][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) whole[b][r] = _mm512_set1_epi32(offset[size_t(r) * groups + g]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      __m512i v[B];
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) {
        v[b] = _mm512_load_si512(w + b * apart + i * 64);
        _mm_prefetch(reinterpret_cast<const char*>(w + b * apart + i * 64 + AHEAD), _MM_HINT_T0);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m512i four = broadcast4(x + size_t(r) * k + g * GROUP + 4 * i);
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) whole[b][r] = _mm512_dpbusd_epi32(whole[b][r], v[b], four);
      }
    }
    __m512 steps[B];
    for (int b = 0; b < B; b++) {
      const uint16_t* at = p.scale + (size_t(block + b) * groups + g) * LANES;
      steps[b] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
      _mm_prefetch(reinterpret_cast<const char*>(at) + AHEAD / 16, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512 by = _mm512_set1_ps(scale[size_t(r) * groups + g]);
#pragma GCC unroll 2
      for (int b = 0; b < B; b++)
        sums[b][r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole[b][r]), by), steps[b], sums[b][r]);
    }
  }
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) out[b][r] = sums[b][r];
}

// One block: the nibbles of two leave no registers to hold their sums (measured: slower at any number of rows).
template <int R>
inline void int4_tile(const Product& p, int block, const Activations& a, int row, __m512* out) {
  const int k = p.k, groups = k / GROUP;
  const uint8_t* w = p.weight + block * block_bytes(INT4, k);
  const int8_t* x = a.whole + size_t(row) * k;
  const float* scale = a.scale + size_t(row) * groups;
  const float* total = a.sum + size_t(row) * groups;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sums[R];
  for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; g++, w += INT4_GROUP_BYTES) {
    __m512i whole[R];
    for (int r = 0; r < R; r++) whole[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512i both = _mm512_load_si512(w + i * 64);
      const __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      _mm_prefetch(reinterpret_cast<const char*>(w + i * 64 + AHEAD), _MM_HINT_T0);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const int8_t* four = x + size_t(r) * k + g * GROUP + 4 * i;
        whole[r] = _mm512_dpbusd_epi32(whole[r], first, broadcast4(four));
        whole[r] = _mm512_dpbusd_epi32(whole[r], second, broadcast4(four + GROUP / 2));
      }
    }
    const __m512 step = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(w + 256)));
    const __m512 least = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(w + 288)));
    _mm_prefetch(reinterpret_cast<const char*>(w + 256 + AHEAD), _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[r]), _mm512_set1_ps(scale[size_t(r) * groups + g]));
      sums[r] = _mm512_fmadd_ps(part, step, sums[r]);
      sums[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(total[size_t(r) * groups + g]), sums[r]);
    }
  }
  for (int r = 0; r < R; r++) out[r] = sums[r];
}

template <int R, int B>
inline void bf16_tile(const Product& p, int block, const Activations& a, int row, __m512 (*out)[TILE]) {
  const int k = p.k;
  const size_t apart = block_bytes(BF16, k);
  const uint8_t* w = p.weight + block * apart;
  const uint16_t* x = a.bf16 + size_t(row) * k;
  __m512 sums[B][R];
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) sums[b][r] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int i = 0; i < k; i += 2, w += 64) {
    __m512bh v[B];
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) {
      v[b] = reinterpret_cast<__m512bh>(_mm512_load_si512(w + b * apart));
      _mm_prefetch(reinterpret_cast<const char*>(w + b * apart + AHEAD), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const __m512bh two = reinterpret_cast<__m512bh>(broadcast4(x + size_t(r) * k + i));
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) sums[b][r] = _mm512_dpbf16_ps(sums[b][r], v[b], two);
    }
  }
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) out[b][r] = sums[b][r];
}

// Whether two blocks at once are the faster way; their bits are the same.
template <int R>
bool in_pairs(int kind) {
  return kind == BF16 ? R <= TILE / 2 : kind == INT8 && R == TILE / 2;
}

inline void add_bias(const Product& p, int block, int blocks, int rows, __m512 (*out)[TILE]) {
  if (p.bias == nullptr) return;
  for (int b = 0; b < blocks; b++) {
    const __m512 bias = _mm512_loadu_ps(p.bias + (block + b) * LANES);
    for (int r = 0; r < rows; r++) out[b][r] = _mm512_add_ps(out[b][r], bias);
  }
}

template <int R>
inline void tile(const Product& p, int block, int blocks, const Activations& a, int row, __m512 (*out)[TILE]) {
  if (blocks == 2 && in_pairs<R>(p.kind)) {
    if (p.kind == INT8) int8_tile<R, 2>(p, block, a, row, out);
    else bf16_tile<R, 2>(p, block, a, row, out);
  } else {
    for (int b = 0; b < blocks; b++) {
      if (p.kind == INT8) int8_tile<R, 1>(p, block + b, a, row, out + b);
      else if (p.kind == INT4) int4_tile<R>(p, block + b, a, row, out[b]);
      else bf16_tile<R, 1>(p, block + b, a, row, out + b);
    }
  }
  add_bias(p, block, blocks, R, out);
}

// More rows than half a tile, of bfloat16: a block at a time, so that the weights are read once for all of them.
template <int R>
inline void wide_tile(const Product& p, int block, int blocks, const Activations& a, int row, __m512 (*out)[TILE]) {
  for (int b = 0; b < blocks; b++) bf16_tile<R, 1>(p, block + b, a, row, out + b);
  add_bias(p, block, blocks, R, out);
}

// Outputs of `blocks` (1 or 2) from `block` on, of rows [row, row + count), count as `tile_rows` has it.
void outputs(const Product& p, int block, int blocks, const Activations& a, int row, int count, __m512 (*out)[TILE]) {
  switch (count) {
    case 1: return tile<1>(p, block, blocks, a, row, out);
    case 2: return tile<2>(p, block, blocks, a, row, out);
    case 3: return tile<3>(p, block, blocks, a, row, out);
    case 4: return tile<4>(p, block, blocks, a, row, out);
    case 5: return tile<5>(p, block, blocks, a, row, out);
    case 6: return tile<6>(p, block, blocks, a, row, out);
    case 7: return tile<7>(p, block, blocks, a, row, out);
    case 8: return tile<8>(p, block, blocks, a, row, out);
    case 9: return wide_tile<9>(p, block, blocks, a, row, out);
    case 10: return wide_tile<10>(p, block, blocks, a, row, out);
    case 11: return wide_tile<11>(p, block, blocks, a, row, out);
    case 12: return wide_tile<12>(p, block, blocks, a, row, out);
    case 13: return wide_tile<13>(p, block, blocks, a, row, out);
    case 14: return wide_tile<14>(p, block, blocks, a, row, out);
    case 15: return wide_tile<15>(p, block, blocks, a, row, out);
    default: return wide_tile<16>(p, block, blocks, a, row, out);
  }
}

// Units of work handed out one after another: single ones, or runs that grow shorter towards the end.
struct Counter {
  alignas(64) std::atomic<int> next{0};

  // The first of a run, and in `count` its length; `total` or more where all are taken. A core that goes on where it was
  // finds what the prefetchers have brought already; short runs at the end leave nobody waiting.
  int run(int total, int threads, int& count) {
    int low = next.load(std::memory_order_relaxed);
    do {
      if (low >= total) return low;
      count = std::max(1, (total - low) / (2 * threads));
    } while (!next.compare_exchange_weak(low, low + count, std::memory_order_relaxed));
    return low;
  }
};

// Rows of the tile that begins at `row`. The first is as wide as may be, since it waits for memory; those behind it find
// the weights in the core's cache and are bound by arithmetic, at its best in halves of a tile; a rest goes along.
int tile_rows(int kind, int row, int rows) {
  const int left = rows - row;
  if (kind != BF16) return std::min(TILE / 2, left);
  return left < TILE ? left : row == 0 ? TILE : TILE / 2;
}

// Calls `each(block, blocks, row, count)` for all runs of `step` blocks and all tiles of rows; a unit's weights stay
// in the core's cache while the rows go by.
template <class F>
void over_blocks(Counter& counter, const Product& p, int step, int rows, F each) {
  const size_t bytes = block_bytes(p.kind, p.k) * step;
  const int together = tile_rows(p.kind, 0, rows) == rows ? 1 : std::max<int>(1, std::min<int>(8, (384 << 10) / bytes));
  const int units = (p.blocks + together * step - 1) / (together * step), threads = omp_get_num_threads();
  for (int first, length; (first = counter.run(units, threads, length)) < units;)
    for (int unit = first; unit < first + length; unit++) {
      const int low = unit * together * step, high = std::min(low + together * step, p.blocks);
      for (int row = 0, count; row < rows; row += count) {
        count = tile_rows(p.kind, row, rows);
        for (int block = low; block < high; block += step) each(block, std::min(step, high - block), row, count);
      }
    }
}

// -- the model -------------------------------------------------------------------------------------------------

struct Workspace {  // of one thread
  Scratch<float> scores, mixed;
  Scratch<uint16_t> queries;
  alignas(64) __m512i keys[256], values[128];
  alignas(64) uint16_t weights[QUERIES * KEYS];  // of one block of keys
  __m512 most[QUERIES], total[QUERIES];
  float top[QUERIES];
};

struct Model {
  Shape shape;
  std::vector<Layer> layers;
  const float* norm;
  Product head;
  const uint16_t* embedding;  // [vocab, hidden] bfloat16, null where the head's weights are the embedding
  int threads;
  std::vector<Workspace> workspaces;
  std::vector<Counter> counters;
  Scratch<float> x_memory, qkv_memory;
  Activations normed, mixed, inner;
  int qkv_width = 0;

  Model(const Shape& s, const Layer* ls, const float* n, const Product& h, const uint16_t* e, int t)
      : shape(s), layers(ls, ls + s.layers), norm(n), head(h), embedding(e), threads(t), workspaces(t),
        counters(size_t(s.layers) * 5 + 2) {
    qkv_width = layers[0].qkv.blocks * LANES;
  }
};

float half_to_float(uint16_t h) { return _cvtsh_ss(h); }

// Column k of output n of a weight, as it was before it was packed.
float weight_at(const Product& p, int n, int k) {
  const int block = n / LANES, lane = n % LANES;
  const uint8_t* w = p.weight + block * block_bytes(p.kind, p.k);
  if (p.kind == BF16) {
    uint16_t bits;
    std::memcpy(&bits, w + (size_t(k / 2) * LANES + lane) * 4 + (k % 2) * 2, 2);
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  if (p.kind == INT8) {
    const float step = half_to_float(p.scale[(size_t(block) * (p.k / GROUP) + k / GROUP) * LANES + lane]);
    return step * (int(w[(size_t(k / 4) * LANES + lane) * 4 + k % 4]) - 128);
  }
  w += size_t(k / GROUP) * INT4_GROUP_BYTES;
  const int i = k % GROUP / 4;
  const uint8_t both = w[(size_t(i % 4) * LANES + lane) * 4 + k % 4];
  uint16_t step, least;
  std::memcpy(&step, w + 256 + 2 * lane, 2);
  std::memcpy(&least, w + 288 + 2 * lane, 2);
  return half_to_float(step) * (i < 4 ? both & 15 : both >> 4) + half_to_float(least);
}

void embed(const Model& m, int64_t id, float* x) {
  const int width = m.shape.hidden;
  if (m.embedding == nullptr) {
    for (int k = 0; k < width; k++) x[k] = weight_at(m.head, int(id), k);
    return;
  }
  for (int k = 0; k < width; k += LANES) _mm512_storeu_ps(x + k, load_bf16(m.embedding + size_t(id) * width + k));
}

float inverse_root(const float* x, int width, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int k = 0; k < width; k += LANES) {
    __m512 v = _mm512_loadu_ps(x + k);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps);
}

void norm_row(const float* x, const float* weight, float eps, int row, Activations& to) {
  __m512 by = _mm512_set1_ps(inverse_root(x, to.k, eps));
  for (int k = 0; k < to.k; k += GROUP) {
    __m512 low = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + k), by), _mm512_loadu_ps(weight + k));
    __m512 high = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + k + LANES), by), _mm512_loadu_ps(weight + k + LANES));
    to.put(row, k, low, high);
  }
}

// Norm (where there is one) and turn a head in place.
void turn_head(float* head, const float* norm, const Model& m, const Pass& pass, int row) {
  const int width = m.shape.head_dim, half = m.shape.rotary / 2;
  if (norm != nullptr) {
    const float by = inverse_root(head, width, m.shape.eps);
    for (int i = 0; i < width; i++) head[i] = head[i] * by * norm[i];
  }
  const float* cosine = pass.cosines + size_t(pass.turns[row]) * half;
  const float* sine = pass.sines + size_t(pass.turns[row]) * half;
  for (int i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosine[i] - b * sine[i];
    head[i + half] = b * cosine[i] + a * sine[i];
  }
}

void rotate_and_keep(Model& m, const Layer& layer, const Pass& pass, int index, int row) {
  const Shape& s = m.shape;
  float* qkv = m.qkv_memory.data + size_t(row) * m.qkv_width;
  for (int h = 0; h < s.heads + s.kv_heads; h++)
    turn_head(qkv + h * s.head_dim, h < s.heads ? layer.query_norm : layer.key_norm, m, pass, row);
  const size_t capacity = pass.capacity, half = pass.cache_slots * s.kv_heads * capacity * s.head_dim;
  for (int h = 0; h < s.kv_heads; h++) {
    size_t at = ((size_t(pass.slots[row]) * s.kv_heads + h) * capacity + pass.places[row]) * s.head_dim;
    const float* key = qkv + (s.heads + h) * s.head_dim;
    const float* value = key + s.kv_heads * s.head_dim;
    for (int i = 0; i < s.head_dim; i += LANES) {
      store_bf16(pass.caches[index] + at + i, _mm512_loadu_ps(key + i));
      store_bf16(pass.caches[index] + half + at + i, _mm512_loadu_ps(value + i));
    }
  }
}

// -- attention -------------------------------------------------------------------------------------------------

// 16 rows of 16 pairs, transposed.
inline void transpose16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

struct Sight {  // the keys of a row in the order of the text
  int seen, count;
  const int32_t* tail;
  int place(int j) const {
    j = std::min(j, count - 1);
    return j < seen ? j : tail[j - seen];
  }
};

inline Sight sight_of(const Pass& pass, int row) {
  const int from = pass.tail_from[row];
  return {pass.seen[row], pass.seen[row] + pass.tail_from[row + 1] - from, pass.tails + from};
}

// Scores of B blocks of 16 keys, each laid out by pairs of a head's values, with N queries. Registers hold them all, so
// that a value read is used more than once.
template <int N, int B>
inline void score(const __m512i* const* keys, const uint16_t* const* q, int pairs, __m512 (*out)[TOGETHER]) {
  __m512 sum[B][N];
  for (int b = 0; b < B; b++)
    for (int i = 0; i < N; i++) sum[b][i] = _mm512_setzero_ps();
  for (int d = 0; d < pairs; d++) {
    __m512bh key[B];
    for (int b = 0; b < B; b++) key[b] = (__m512bh)keys[b][d];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const __m512bh query = (__m512bh)broadcast4(q[i] + 2 * d);
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) sum[b][i] = _mm512_dpbf16_ps(sum[b][i], key[b], query);
    }
  }
  for (int b = 0; b < B; b++)
    for (int i = 0; i < N; i++) out[b][i] = sum[b][i];
}

// Adds 16 values, laid out by pairs of keys, under the weights of up to N queries; C times 16 of a head's values at once.
template <int N, int C>
inline void mix(const __m512i* values, const uint16_t* const* weights, float* const* to, int count, int chunks) {
  for (int c = 0; c < chunks; c += C) {
    __m512 sum[C][N];
    for (int b = 0; b < C; b++)
      for (int i = 0; i < N; i++) sum[b][i] = _mm512_loadu_ps(to[i] + (c + b) * LANES);
#pragma GCC unroll 8
    for (int j = 0; j < KEYS / 2; j++) {
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const __m512bh weight = (__m512bh)broadcast4(weights[i] + 2 * j);
#pragma GCC unroll 4
        for (int b = 0; b < C; b++)
          sum[b][i] = _mm512_dpbf16_ps(sum[b][i], (__m512bh)values[j * chunks + c + b], weight);
      }
    }
    for (int b = 0; b < C; b++)
      for (int i = 0; i < count; i++) _mm512_storeu_ps(to[i] + (c + b) * LANES, sum[b][i]);
  }
}

// `mix` for one query that sees the first `left` of the 16 alone: what lies behind may be no number.
inline void mix_some(const __m512i* values, const uint16_t* weights, float* to, int left, int chunks) {
  for (int c = 0; c < chunks; c++) {
    __m512 sum = _mm512_loadu_ps(to + c * LANES);
    for (int j = 0; j < left / 2; j++)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)values[j * chunks + c], (__m512bh)broadcast4(weights + 2 * j));
    if (left % 2) {
      const __m512i one = _mm512_and_si512(values[left / 2 * chunks + c], _mm512_set1_epi32(0xffff));
      sum = _mm512_dpbf16_ps(sum, (__m512bh)one, (__m512bh)broadcast4(weights + left - 1));
    }
    _mm512_storeu_ps(to + c * LANES, sum);
  }
}

// Puts the scores of a query with block `b` of keys in their place, those alone that it sees.
inline void keep_score(Workspace& space, int query, float* scores, int b, int seen, __m512 made) {
  const int left = seen - b * KEYS;
  if (left <= 0) return;
  if (left < KEYS) made = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), __mmask16((1u << left) - 1), made);
  _mm512_storeu_ps(scores + b * KEYS, made);
  space.most[query] = b == 0 ? made : _mm512_max_ps(space.most[query], made);
}

// The weights of a query over 16 keys, of which it sees the first `left`, not yet divided by their sum.
inline void weigh(Workspace& space, int query, const float* scores, int left) {
  const __m512 score = _mm512_loadu_ps(scores);
  __m512 weight = exp_of(_mm512_sub_ps(score, _mm512_set1_ps(space.top[query])));
  weight = _mm512_mask_mov_ps(weight, _mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q), score);
  if (left < KEYS) weight = _mm512_maskz_mov_ps(__mmask16((1u << left) - 1), weight);
  store_bf16(space.weights + query * KEYS, weight);
  space.total[query] = _mm512_add_ps(space.total[query], load_bf16(space.weights + query * KEYS));
}

// Rows [first, last) of one sequence over one KV head. Where there are several, each sees what the last one sees
// but for its end.
void attend(Model& m, const Pass& pass, int index, int first, int last, int kv_head, Workspace& space) {
  const Shape& s = m.shape;
  const int group = s.heads / s.kv_heads, width = s.head_dim, pairs = width / 2, chunks = width / LANES;
  const int queries = (last - first) * group;
  const Sight sight = sight_of(pass, last - 1);
  const int blocks = (sight.count + KEYS - 1) / KEYS, padded = blocks * KEYS;
  const size_t capacity = pass.capacity, half = pass.cache_slots * s.kv_heads * capacity * width;
  const uint16_t* keys = pass.caches[index] + (size_t(pass.slots[first]) * s.kv_heads + kv_head) * capacity * width;
  const uint16_t* values = keys + half;

  uint16_t* q = space.queries.of(size_t(queries) * width);
  int counts[QUERIES];
  for (int i = 0; i < queries; i++) {
    const int row = first + i / group;
    const float* from = m.qkv_memory.data + size_t(row) * m.qkv_width + (kv_head * group + i % group) * width;
    counts[i] = sight_of(pass, row).count;
    for (int d = 0; d < width; d += LANES)
      store_bf16(q + i * width + d, _mm512_mul_ps(_mm512_loadu_ps(from + d), _mm512_set1_ps(s.attention_scale)));
  }

  float* scores = space.scores.of(size_t(queries) * padded);
  for (int b = 0; b < blocks; b += 2) {
    const int both = std::min(2, blocks - b);
    const __m512i* laid[2] = {space.keys, space.keys + pairs};
    for (int n = 0; n < both; n++) {
      const uint16_t* at[KEYS];
      for (int j = 0; j < KEYS; j++) at[j] = keys + size_t(sight.place((b + n) * KEYS + j)) * width;
      for (int part = 0; part < pairs / 16; part++) {
        __m512i* to = space.keys + n * pairs + part * 16;
        for (int j = 0; j < KEYS; j++) to[j] = _mm512_loadu_si512(at[j] + part * 32);
        transpose16(to);
      }
    }
    for (int i = 0, some; i < queries; i += some) {
      some = std::min(TOGETHER, queries - i);
      if (counts[i + some - 1] <= b * KEYS) continue;  // counts rise
      const uint16_t* own[TOGETHER];
      for (int n = 0; n < TOGETHER; n++) own[n] = q + std::min(i + n, queries - 1) * width;
      __m512 made[2][TOGETHER];
      if (some <= TOGETHER / 2) {
        if (both == 2) score<TOGETHER / 2, 2>(laid, own, pairs, made);
        else score<TOGETHER / 2, 1>(laid, own, pairs, made);
      } else {
        if (both == 2) score<TOGETHER, 2>(laid, own, pairs, made);
        else score<TOGETHER, 1>(laid, own, pairs, made);
      }
      for (int query = i; query < i + some; query++)
        for (int n = 0; n < both; n++)
          keep_score(space, query, scores + size_t(query) * padded, b + n, counts[query], made[n][query - i]);
    }
  }

  float* mixed = space.mixed.of(size_t(queries) * width);
  std::memset(mixed, 0, size_t(queries) * width * sizeof(float));
  for (int i = 0; i < queries; i++) {
    space.top[i] = _mm512_reduce_max_ps(space.most[i]);
    space.total[i] = _mm512_setzero_ps();
  }
  for (int b = 0; b < blocks; b++) {
    for (int j = 0; j < KEYS; j += 2) {
      const uint16_t* one = values + size_t(sight.place(b * KEYS + j)) * width;
      const uint16_t* two = values + size_t(sight.place(b * KEYS + j + 1)) * width;
      for (int c = 0; c < chunks; c++) {
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(one + c * LANES)));
        __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(two + c * LANES)));
        space.values[j / 2 * chunks + c] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      }
    }
    int i = 0;
    while (i < queries && counts[i] <= b * KEYS) i++;
    for (int n = i; n < queries; n++) weigh(space, n, scores + size_t(n) * padded + b * KEYS, counts[n] - b * KEYS);
    for (; i < queries && counts[i] < (b + 1) * KEYS; i++)
      mix_some(space.values, space.weights + i * KEYS, mixed + size_t(i) * width, counts[i] - b * KEYS, chunks);
    for (int some; i < queries; i += some) {
      some = std::min(TOGETHER, queries - i);
      const uint16_t* own[TOGETHER];
      float* to[TOGETHER];
      for (int n = 0; n < TOGETHER; n++) {
        own[n] = space.weights + std::min(i + n, queries - 1) * KEYS;
        to[n] = mixed + size_t(std::min(i + n, queries - 1)) * width;
      }
      if (some > TOGETHER / 2) mix<TOGETHER, 2>(space.values, own, to, some, chunks);
      else if (chunks % 4 == 0) mix<TOGETHER / 2, 4>(space.values, own, to, some, chunks);
      else mix<TOGETHER / 2, 2>(space.values, own, to, some, chunks);
    }
  }
  for (int i = 0; i < queries; i++) {
    const __m512 by = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(space.total[i]));
    const float* from = mixed + size_t(i) * width;
    const int at = (kv_head * group + i % group) * width;
    for (int d = 0; d < width; d += GROUP)
      m.mixed.put(first + i / group, at + d, _mm512_mul_ps(_mm512_loadu_ps(from + d), by),
                  _mm512_mul_ps(_mm512_loadu_ps(from + d + LANES), by));
  }
}

// -- the pass --------------------------------------------------------------------------------------------------

void add_product(Counter& counter, const Product& p, const Activations& a, int rows, float* x, int width) {
  over_blocks(counter, p, 2, rows, [&](int block, int blocks, int row, int count) {
    __m512 out[2][TILE];
    outputs(p, block, blocks, a, row, count, out);
    for (int b = 0; b < blocks; b++)
      for (int r = 0; r < count; r++) {
        float* to = x + size_t(row + r) * width + (block + b) * LANES;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), out[b][r]));
      }
  });
}

void gated_product(Counter& counter, const Product& p, const Activations& a, int rows, Activations& to) {
  over_blocks(counter, p, 4, rows, [&](int block, int, int row, int count) {
    __m512 made[2][TILE], gate_up[2][TILE];
    for (int half = 0; half < 2; half++) {
      outputs(p, block + 2 * half, 2, a, row, count, gate_up);
      for (int r = 0; r < count; r++) made[half][r] = _mm512_mul_ps(silu(gate_up[0][r]), gate_up[1][r]);
    }
    for (int r = 0; r < count; r++) to.put(row + r, block / 4 * GROUP, made[0][r], made[1][r]);
  });
}

void plain_product(Counter& counter, const Product& p, const Activations& a, int rows, float* to, size_t stride) {
  over_blocks(counter, p, 2, rows, [&](int block, int blocks, int row, int count) {
    __m512 out[2][TILE];
    outputs(p, block, blocks, a, row, count, out);
    for (int b = 0; b < blocks; b++) {
      const int left = std::min(LANES, int(stride) - (block + b) * LANES);
      for (int r = 0; r < count; r++) {
        float* at = to + size_t(row + r) * stride + (block + b) * LANES;
        _mm512_mask_storeu_ps(at, __mmask16((1u << left) - 1), out[b][r]);
      }
    }
  });
}

void run_pass(Model& m, const Pass& pass) {
  const Shape& s = m.shape;
  const int rows = pass.rows, width = s.hidden;
  float* x = m.x_memory.of(size_t(rows) * width);
  m.qkv_memory.of(size_t(rows) * m.qkv_width);
  m.mixed.reserve(rows, m.layers[0].out);
  m.inner.reserve(rows, m.layers[0].down);
  m.normed.reserve(std::max(rows, pass.wanted_rows), m.layers[0].qkv);
  for (auto& counter : m.counters) counter.next.store(0, std::memory_order_relaxed);

  auto job = [&](const int who, const int threads) {
    Workspace& space = m.workspaces[who];
    auto keep = [&](int layer) {
      for (int t = 0; t < pass.tap_count; t++)
        if (pass.taps[t] == layer)
          for (int r = who; r < rows; r += threads)
            std::memcpy(pass.tap_out[t] + size_t(r) * width, x + size_t(r) * width, width * sizeof(float));
    };
    for (int r = who; r < rows; r += threads) embed(m, pass.ids[r], x + size_t(r) * width);
    for (int index = 0; index < pass.layers; index++) {
      const Layer& layer = m.layers[index];
      Counter* counter = &m.counters[size_t(index) * 5];
      for (int r = who; r < rows; r += threads) norm_row(x + size_t(r) * width, layer.input_norm, s.eps, r, m.normed);
      barrier();
      plain_product(counter[0], layer.qkv, m.normed, rows, m.qkv_memory.data, m.qkv_width);
      barrier();
      for (int r = who; r < rows; r += threads) rotate_and_keep(m, layer, pass, index, r);
      if (pass.keys_only && index == pass.layers - 1) return;
      barrier();
      for (int unit; (unit = counter[1].next.fetch_add(1, std::memory_order_relaxed)) < pass.tasks * s.kv_heads;) {
        const int task = unit / s.kv_heads;
        attend(m, pass, index, pass.task_row[task], pass.task_row[task + 1], unit % s.kv_heads, space);
      }
      barrier();
      add_product(counter[2], layer.out, m.mixed, rows, x, width);
      barrier();
      for (int r = who; r < rows; r += threads) norm_row(x + size_t(r) * width, layer.mlp_norm, s.eps, r, m.normed);
      barrier();
      gated_product(counter[3], layer.gate_up, m.normed, rows, m.inner);
      barrier();
      add_product(counter[4], layer.down, m.inner, rows, x, width);
      barrier();
      keep(index);
    }
    if (pass.wanted_rows == 0 && pass.tap_count == 0) return;
    if (who == 0) m.normed.reserve(std::max(rows, pass.wanted_rows), m.head);
    barrier();
    for (int r = who; r < pass.wanted_rows; r += threads)
      norm_row(x + size_t(pass.wanted[r]) * width, m.norm, s.eps, r, m.normed);
    barrier();
    plain_product(m.counters[size_t(s.layers) * 5], m.head, m.normed, pass.wanted_rows, pass.logits, s.vocab);
    for (int t = 0; t < pass.tap_count; t++) {
      if (pass.taps[t] != s.layers) continue;
      for (int r = who; r < rows; r += threads) {
        const float* from = x + size_t(r) * width;
        const float by = inverse_root(from, width, s.eps);
        for (int k = 0; k < width; k++) pass.tap_out[t][size_t(r) * width + k] = from[k] * by * m.norm[k];
      }
    }
  };
#pragma omp parallel num_threads(m.threads)
  job(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace

// -- what Python calls -----------------------------------------------------------------------------------------

extern "C" {

void* paceline_new(const Shape* shape, const Layer* layers, const float* norm, const Product* head,
                   const uint16_t* embedding, int threads) {
  return new Model(*shape, layers, norm, *head, embedding, threads);
}

void paceline_free(void* model) { delete static_cast<Model*>(model); }

void paceline_pass(void* model, const Pass* pass) { run_pass(*static_cast<Model*>(model), *pass); }

int64_t paceline_block_bytes(int kind, int k) { return int64_t(block_bytes(kind, k)); }

// A product by itself: x [rows, k] to out [rows, n].
void paceline_product(const Product* p, const float* x, int rows, float* out) {
  Activations a;
  a.reserve(rows, *p);
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < p->k; k += GROUP) {
      const float* from = x + size_t(r) * p->k + k;
      a.put(r, k, _mm512_loadu_ps(from), _mm512_loadu_ps(from + LANES));
    }
  Counter counter;
  plain_product(counter, *p, a, rows, out, p->n);
}

// Row n of a packed weight, back in floats [k].
void paceline_weight_row(const Product* p, int n, float* out) {
  for (int k = 0; k < p->k; k++) out[k] = weight_at(*p, n, k);
}

// Pack rows [n, k] of bfloat16 as they are.
void paceline_pack_bf16(const uint16_t* from, int n, int k, uint8_t* to) {
  for (int row = 0; row < n; row++) {
    uint8_t* block = to + (row / LANES) * block_bytes(BF16, k);
    for (int c = 0; c < k; c += 2)
      std::memcpy(block + (size_t(c / 2) * LANES + row % LANES) * 4, from + size_t(row) * k + c, 4);
  }
}

// Pack whole numbers [n, k] from -127 to 127.
void paceline_pack_int8(const int8_t* from, int n, int k, uint8_t* to) {
  for (int row = 0; row < n; row++) {
    uint8_t* block = to + (row / LANES) * block_bytes(INT8, k);
    for (int c = 0; c < k; c++)
      block[(size_t(c / 4) * LANES + row % LANES) * 4 + c % 4] = uint8_t(int(from[size_t(row) * k + c]) + 128);
  }
}

// Pack whole numbers [n, k] from 0 to 15 with scales and minima [n, k / 32] in float16.
void paceline_pack_int4(const uint8_t* from, const uint16_t* scale, const uint16_t* least, int n, int k, uint8_t* to) {
  const int groups = k / GROUP;
  for (int row = 0; row < n; row++) {
    uint8_t* block = to + (row / LANES) * block_bytes(INT4, k);
    const int lane = row % LANES;
    for (int g = 0; g < groups; g++) {
      uint8_t* w = block + size_t(g) * INT4_GROUP_BYTES;
      const uint8_t* q = from + size_t(row) * k + g * GROUP;
      for (int i = 0; i < 16; i++) w[(size_t(i / 4) * LANES + lane) * 4 + i % 4] = uint8_t(q[i] | q[i + 16] << 4);
      std::memcpy(w + 256 + 2 * lane, scale + size_t(row) * groups + g, 2);
      std::memcpy(w + 288 + 2 * lane, least + size_t(row) * groups + g, 2);
    }
  }
}
}
