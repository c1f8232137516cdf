// Counters and planted faults, in memory of this process or in a file that a test can open too.
#include "runtime.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace fake {

std::recursive_mutex mutex;

static const char *const fault_names[] = {
#define X(name) #name,
    FAKE_FAULTS(X)
#undef X
};

static Report *shared_report() {
  const char *folder = getenv("FAKE_NPU_REPORTS");
  if (!folder || !*folder) return nullptr;
  std::string path = std::string(folder) + "/" + std::to_string(getpid());
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Report))) return nullptr;
  void *place = mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return place == MAP_FAILED ? nullptr : static_cast<Report *>(place);
}

// FAKE_NPU_FAULTS, for example `malloc_in=5,malloc_failures=2`.
static void plant_from_environment(Report &report) {
  const char *text = getenv("FAKE_NPU_FAULTS");
  std::stringstream parts(text ? text : "");
  for (std::string part; std::getline(parts, part, ',');)
    for (int i = 0; i < faults; i++)
      if (part.rfind(std::string(fault_names[i]) + "=", 0) == 0)
        report.fault[i] = atoll(part.c_str() + strlen(fault_names[i]) + 1);
}

static Report *place;

Report &report() {
  Lock lock(mutex);
  if (!place) {
    place = shared_report();
    if (!place) place = new Report();
    plant_from_environment(*place);
  }
  return *place;
}

void count(Counter what, int64_t by) { report().counter[what] += by; }

void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(report().message, sizeof report().message, format, arguments);
  va_end(arguments);
}

aclError broken() {
  if (report().fault[fault_lost]) {
    say("EE9999: the heartbeat of the device is lost");
    return ACL_ERROR_RT_LOST_HEARTBEAT;
  }
  if (!report().fault[fault_faulted]) return ACL_SUCCESS;
  say("EZ9999: an exception occurred during AICORE execution, error code is %d", kernel_fault);
  return kernel_fault;
}

size_t setting(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace fake

extern "C" {
__attribute__((visibility("default"))) fake::Report *fake_report() { return &fake::report(); }
// After a fork: the new process has its own, and another environment.
__attribute__((visibility("default"))) void fake_forget_report() { fake::place = nullptr; }
__attribute__((visibility("default"))) const char *fake_counter_names() {
#define X(name) #name " "
  return FAKE_COUNTERS(X);
}
__attribute__((visibility("default"))) const char *fake_fault_names() { return FAKE_FAULTS(X); }
#undef X
}
