// HCCL between processes of this machine: each rank writes into its part of a shared memory, and all read.
#include "runtime.h"

#include <fcntl.h>
#include <hccl/hccl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {

static constexpr size_t head_bytes = 4096, part_bytes = 64ull << 20;

struct Meeting {
  std::atomic<int> opened, arrived, generation;
};

struct Communicator {
  int size, rank;
  Meeting *meeting;
  char *parts;
  char name[128];
  char *part(int rank) const { return parts + rank * part_bytes; }
};

// Of the device's memory, for what comes and what goes: HCCL_BUFFSIZE MiB each.
static bool take_buffers() { return take_for_cann(2 * scaled(setting("HCCL_BUFFSIZE", 200) << 20)); }

static HcclResult open_communicator(uint32_t size, const HcclRootInfo *root, uint32_t rank, HcclComm *out) {
  if (!take_buffers()) return HCCL_E_MEMORY;
  auto made = new Communicator{int(size), int(rank), nullptr, nullptr, {}};
  strncpy(made->name, root->internal[0] ? root->internal : "/fake-hccl-alone", sizeof made->name - 1);
  size_t bytes = head_bytes + size * part_bytes;
  int file = shm_open(made->name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes)) return HCCL_E_SYSCALL;
  void *place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (place == MAP_FAILED) return HCCL_E_SYSCALL;
  made->meeting = static_cast<Meeting *>(place);
  made->parts = static_cast<char *>(place) + head_bytes;
  // Nobody opens it after the last rank, and nothing stays behind if one is killed.
  if (++made->meeting->opened == made->size) shm_unlink(made->name);
  *out = made;
  return HCCL_SUCCESS;
}

// Returns false when a rank does not come within FAKE_HCCL_TIMEOUT_MS: by default longer than a busy machine holds one up.
static bool meet(Communicator *among) {
  int generation = among->meeting->generation;
  if (++among->meeting->arrived == among->size) {
    among->meeting->arrived = 0;
    among->meeting->generation++;
    return true;
  }
  double limit = setting("FAKE_HCCL_TIMEOUT_MS", 100000) / 1e3;
  timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  while (among->meeting->generation == generation) {
    usleep(20);
    clock_gettime(CLOCK_MONOTONIC, &now);
    if ((now.tv_sec - begin.tv_sec) + (now.tv_nsec - begin.tv_nsec) / 1e9 < limit) continue;
    say("EI0006: Getting socket times out. Reason: a rank of %s did not come", among->name);
    return false;
  }
  return true;
}

static size_t size_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
    case HCCL_DATA_TYPE_INT16:
      return 2;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 4;
  }
}

struct Half {
  using Wide = float;
  _Float16 bits;
  float wide() const { return float(bits); }
  static Half of(float value) { return {_Float16(value)}; }
};

struct Brain {
  using Wide = float;
  uint16_t bits;
  float wide() const {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
  static Brain of(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    word += 0x7fff + ((word >> 16) & 1);  // to nearest, ties to even
    return {uint16_t(word >> 16)};
  }
};

template <class T>
struct Plain {
  using Wide = T;
  T value;
  T wide() const { return value; }
  static Plain of(T value) { return {value}; }
};

template <class T>
static void reduce(const Communicator *among, void *out, uint64_t number, HcclReduceOp op) {
  int ranks = among->size - int(setting("FAKE_HCCL_LEFT_OUT", 0));  // a fault that a test may plant
  for (uint64_t i = 0; i < number; i++) {
    auto result = reinterpret_cast<const T *>(among->part(0))[i].wide();
    for (int rank = 1; rank < ranks; rank++) {
      auto other = reinterpret_cast<const T *>(among->part(rank))[i].wide();
      result = op == HCCL_REDUCE_SUM   ? result + other
               : op == HCCL_REDUCE_MAX ? std::max(result, other)
               : op == HCCL_REDUCE_MIN ? std::min(result, other)
                                       : result * other;
    }
    static_cast<T *>(out)[i] = T::of(result);
  }
}

static HcclResult reduce_as(HcclDataType type, const Communicator *among, void *out, uint64_t n, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32:
      return reduce<Plain<float>>(among, out, n, op), HCCL_SUCCESS;
    case HCCL_DATA_TYPE_FP16:
      return reduce<Half>(among, out, n, op), HCCL_SUCCESS;
    case HCCL_DATA_TYPE_BFP16:
      return reduce<Brain>(among, out, n, op), HCCL_SUCCESS;
    case HCCL_DATA_TYPE_INT32:
      return reduce<Plain<int32_t>>(among, out, n, op), HCCL_SUCCESS;
    case HCCL_DATA_TYPE_INT64:
      return reduce<Plain<int64_t>>(among, out, n, op), HCCL_SUCCESS;
    default:
      return HCCL_E_NOT_SUPPORT;
  }
}

// A collective as it was called, to be called again when a graph that captured it is replayed.
enum Kind { all_reduce, all_gather, broadcast };
struct Call {
  Kind kind;
  void *in, *out;
  uint64_t number;
  HcclDataType type;
  HcclReduceOp op;
  uint32_t root;
  Communicator *among;
};

// Taken by Python (`fake_take_collective`): torch_npu's own thread comes here, which must not wait for the interpreter.
static std::deque<Call *> captured;

static HcclResult run(const Call &call) {
  auto among = call.among;
  size_t bytes = call.number * size_of(call.type);
  if (bytes > part_bytes) return HCCL_E_MEMORY;
  if (call.kind != broadcast || among->rank == int(call.root)) memcpy(among->part(among->rank), call.in, bytes);
  if (!meet(among)) return HCCL_E_TIMEOUT;
  HcclResult result = HCCL_SUCCESS;
  if (call.kind == all_reduce) {
    result = reduce_as(call.type, among, call.out, call.number, call.op);
  } else if (call.kind == broadcast) {
    memcpy(call.out, among->part(int(call.root)), bytes);
  } else {
    for (int rank = 0; rank < among->size; rank++)
      memcpy(static_cast<char *>(call.out) + rank * bytes, among->part(rank), bytes);
  }
  return meet(among) ? result : HCCL_E_TIMEOUT;
}

static HcclResult issue(const Call &call, aclrtStream on) {
  if (broken()) return HCCL_E_INTERNAL;
  auto stream = stream_of(on);
  size_t bytes = call.number * size_of(call.type);
  {
    Lock lock(mutex);
    stream->sequence++;
    count(collective);
    // All ranks capture alike, so none may wait for the others here; the call is kept and made at each replay.
    if (is_capturing()) return captured.push_back(new Call(call)), HCCL_SUCCESS;
    perform(stream, stream->sequence);
    access(stream, call.in, bytes, false);
    access(stream, call.out, call.kind == all_gather ? call.among->size * bytes : bytes, true);
  }
  return run(call);
}

}  // namespace fake

using fake::Communicator;

#pragma GCC visibility push(default)
extern "C" {

// The next collective that was captured, null for none.
void *fake_take_collective() {
  fake::Lock lock(fake::mutex);
  if (fake::captured.empty()) return nullptr;
  auto call = fake::captured.front();
  fake::captured.pop_front();
  return call;
}

// Makes a captured collective again; returns 0, or the error of HCCL.
int fake_repeat_collective(void *call) { return fake::run(*static_cast<fake::Call *>(call)); }

HcclResult HcclGetRootInfo(HcclRootInfo *root) {
  static std::atomic<int> number;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  memset(root, 0, sizeof *root);
  snprintf(root->internal, 64, "/fake-hccl-%d-%ld-%d", getpid(), now.tv_nsec, number++);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *root, uint32_t rank, HcclComm *out) {
  return fake::open_communicator(size, root, rank, out);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *root, uint32_t rank, const HcclCommConfig *,
                                      HcclComm *out) {
  return fake::open_communicator(size, root, rank, out);
}

HcclResult HcclGetCommName(HcclComm among, char *name) {
  strcpy(name, static_cast<Communicator *>(among)->name);
  return HCCL_SUCCESS;
}

HcclResult HcclCommDestroy(HcclComm) { return HCCL_SUCCESS; }

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *result) {
  *result = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void *in, void *out, uint64_t number, HcclDataType type, HcclReduceOp op, HcclComm among,
                         aclrtStream stream) {
  return fake::issue({fake::all_reduce, in, out, number, type, op, 0, static_cast<Communicator *>(among)}, stream);
}

HcclResult HcclAllGather(void *in, void *out, uint64_t number, HcclDataType type, HcclComm among, aclrtStream stream) {
  auto op = HCCL_REDUCE_SUM;  // unused
  return fake::issue({fake::all_gather, in, out, number, type, op, 0, static_cast<Communicator *>(among)}, stream);
}

HcclResult HcclBroadcast(void *buffer, uint64_t number, HcclDataType type, uint32_t root, HcclComm among,
                         aclrtStream stream) {
  auto op = HCCL_REDUCE_SUM;  // unused
  return fake::issue({fake::broadcast, buffer, buffer, number, type, op, root, static_cast<Communicator *>(among)},
                     stream);
}
}
