// Captured graphs. Their content lies in Python (simulator/graphs.py), which is called at each step.
#include "runtime.h"

#include <map>
#include <vector>

namespace fake {

using HookFunction = void (*)(int what, void *a, void *b);
static HookFunction hook;
static Stream *capturing;
static uintptr_t last_model = 64, last_group = 4096;

struct Replay {
  int stream;
  uint64_t sequence;
};
struct TaskGroup {
  void *model;
  size_t updates = 0;
};
static std::map<void *, std::vector<Replay>> replays;  // of each model, in order
static std::map<void *, TaskGroup> groups;

// An update is for the replay of the same number. Whether it comes after the replay before has run to its end.
static bool is_in_order(const TaskGroup &group, const Stream *stream) {
  auto &before = replays[group.model];
  if (!group.updates || before.size() < group.updates) return true;
  auto &last = before[group.updates - 1];
  return comes_after(stream, last.stream, last.sequence);
}

void call_hook(Hook what, void *a, void *b) {
  if (hook) hook(what, a, b);
}

bool is_capturing() { return capturing; }

static void *handle(uintptr_t number) { return reinterpret_cast<void *>(number); }

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

void fake_set_hook(fake::HookFunction function) { fake::hook = function; }

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  fake::capturing = fake::stream_of(stream);
  fake::call_hook(fake::capture_begin, stream, nullptr);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) {
  fake::capturing = nullptr;
  *model = fake::handle(fake::last_model += 16);
  fake::call_hook(fake::capture_end, stream, *model);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
  bool active = fake::capturing == fake::stream_of(stream);
  *status = active ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  *model = fake::handle(fake::last_model + 16);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  *mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  FAKE_ALIVE;
  {
    fake::Lock lock(fake::mutex);
    auto on = fake::stream_of(stream);
    fake::replays[model].push_back({on->id, ++on->sequence});
    fake::perform(on, on->sequence);
  }
  fake::count(fake::replay);
  fake::call_hook(fake::execute, model, stream);
  return ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI) { return ACL_SUCCESS; }

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  fake::call_hook(fake::group_begin, stream, nullptr);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *group) {
  *group = fake::handle(fake::last_group += 16);
  fake::groups[*group] = {fake::handle(fake::last_model + 16)};
  fake::call_hook(fake::group_end, stream, *group);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp group) {
  {
    fake::Lock lock(fake::mutex);
    auto &updated = fake::groups[group];
    if (!fake::is_in_order(updated, fake::stream_of(stream))) {
      fake::say("a graph is updated that may still run: the update does not wait for the replay before");
      return ACL_ERROR_RT_MODEL_RUNNING;
    }
    updated.updates++;
  }
  fake::call_hook(fake::update_begin, stream, group);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  fake::call_hook(fake::update_end, stream, nullptr);
  return ACL_SUCCESS;
}
}
