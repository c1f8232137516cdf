// Memory of the device and pinned memory of the host, both of this process. The device's is given out whole, or as an
// address first, to which pieces are mapped (`expandable_segments`).
#include "runtime.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace fake {

using Blocks = std::map<const char *, size_t>;
static Blocks on_device, pinned;
static size_t used;
static constexpr int uninitialised = 0xCB;  // bytes of new device memory

static size_t real_capacity() {
  size_t real = std::string(soc()) == "Ascend910B4"      ? 32
                : std::string(soc()).find("310P") != std::string::npos ? 24
                                                                       : 64;
  return real << 30;
}

static size_t capacity() { return setting("FAKE_NPU_BYTES", real_capacity()); }

size_t scaled(size_t bytes) { return size_t(double(bytes) * capacity() / real_capacity()); }

static size_t foreign() { return setting("FAKE_NPU_FOREIGN_BYTES", 0); }  // held by other processes

static bool contains(const Blocks &blocks, const void *pointer) {
  Lock lock(mutex);
  auto place = static_cast<const char *>(pointer);
  auto after = blocks.upper_bound(place);
  if (after == blocks.begin()) return false;
  --after;
  return place < after->first + after->second;
}

bool take_for_cann(size_t bytes) {
  Lock lock(mutex);
  if (used + foreign() + bytes > capacity()) return false;
  used += bytes;
  return true;
}

bool is_device_memory(const void *pointer) { return contains(on_device, pointer); }
bool is_pinned_memory(const void *pointer) { return contains(pinned, pointer); }

static void *aligned(size_t bytes) { return aligned_alloc(512, (bytes + 511) / 512 * 512); }

// Whether this allocation is one that a test wants to fail: from the `malloc_in`th on, `malloc_failures` in a row.
static bool planted_failure() {
  int64_t &in = report().fault[fault_malloc_in], &failures = report().fault[fault_malloc_failures];
  if (in > 1) return --in, false;
  if (in == 0) return false;
  if (failures > 1) return --failures, true;
  in = failures = 0;
  return true;
}

// Counts so many bytes as used; false where there are not as many.
static bool take(size_t bytes) {
  count(malloc);
  if (planted_failure() || used + foreign() + bytes > capacity()) return false;
  used += bytes;
  return true;
}

static void give_out(void *place, size_t bytes) {
  memset(place, uninitialised, bytes);
  on_device[static_cast<char *>(place)] = bytes;
}

static aclError allocate(void **pointer, size_t bytes) {
  Lock lock(mutex);
  FAKE_ALIVE;
  if (!take(bytes)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  *pointer = aligned(bytes);
  give_out(*pointer, bytes);
  return ACL_SUCCESS;
}

// Returns the bytes at an address that the device has given out; 0 if it has not.
static size_t take_back(void *pointer) {
  auto place = on_device.find(static_cast<char *>(pointer));
  if (place == on_device.end()) return 0;
  size_t bytes = place->second;
  forget_copies(place->first, bytes);
  forget_accesses(place->first, bytes);
  on_device.erase(place);
  return bytes;
}

static Blocks reserved;  // addresses without memory
struct Physical {
  size_t bytes;
};

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

aclError aclrtMalloc(void **pointer, size_t bytes, aclrtMemMallocPolicy) {
  return fake::allocate(pointer, bytes);
}

aclError aclrtMallocAlign32(void **pointer, size_t bytes, aclrtMemMallocPolicy) {
  return fake::allocate(pointer, bytes);
}

aclError aclrtFree(void *pointer) {
  fake::Lock lock(fake::mutex);
  size_t bytes = fake::take_back(pointer);
  if (!bytes) return ACL_ERROR_INVALID_PARAM;
  fake::used -= bytes;
  free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtReserveMemAddress(void **address, size_t bytes, size_t, void *, uint64_t) {
  fake::Lock lock(fake::mutex);
  *address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  fake::reserved[static_cast<char *>(*address)] = bytes;
  return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *address) {
  fake::Lock lock(fake::mutex);
  auto place = fake::reserved.find(static_cast<char *>(address));
  if (place == fake::reserved.end()) return ACL_ERROR_INVALID_PARAM;
  munmap(address, place->second);
  fake::reserved.erase(place);
  return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t bytes, const aclrtPhysicalMemProp *, uint64_t) {
  fake::Lock lock(fake::mutex);
  FAKE_ALIVE;
  if (!fake::take(bytes)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  *handle = new fake::Physical{bytes};
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  fake::Lock lock(fake::mutex);
  auto physical = static_cast<fake::Physical *>(handle);
  fake::used -= physical->bytes;
  delete physical;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void *address, size_t bytes, size_t, aclrtDrvMemHandle, uint64_t) {
  fake::Lock lock(fake::mutex);
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  fake::give_out(address, bytes);
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *address) {
  fake::Lock lock(fake::mutex);
  size_t bytes = fake::take_back(address);
  if (!bytes) return ACL_ERROR_INVALID_PARAM;
  constexpr int fresh = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(address, bytes, PROT_NONE, fresh, -1, 0) == address ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtMallocHost(void **pointer, size_t bytes) {
  fake::Lock lock(fake::mutex);
  *pointer = fake::aligned(bytes);
  fake::pinned[static_cast<char *>(*pointer)] = bytes;
  return ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void **pointer, uint64_t bytes, aclrtMallocConfig *) {
  return aclrtMallocHost(pointer, bytes);
}

aclError aclrtFreeHost(void *pointer) {
  fake::Lock lock(fake::mutex);
  auto place = fake::pinned.find(static_cast<char *>(pointer));
  if (place == fake::pinned.end()) return ACL_ERROR_INVALID_PARAM;
  fake::forget_copies(place->first, place->second);
  fake::pinned.erase(place);
  free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total) {
  fake::Lock lock(fake::mutex);
  *total = fake::capacity();
  *free_bytes = *total - fake::used - fake::foreign();
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = fake::is_device_memory(pointer)   ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : fake::is_pinned_memory(pointer) ? ACL_MEM_LOCATION_TYPE_HOST
                                                                : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}
}
