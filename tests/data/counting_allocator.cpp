// An allocator for CPU tensors that counts the bytes in use and their peak, and refuses requests beyond a limit. It
// wraps torch's own allocator, so it sees every storage of every thread, and the temporaries inside of operators.
// Not counted are the buffers that gloo's threads copy tensors to, because NCCL needs none.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

std::mutex guard;
std::unordered_map<void*, size_t> blocks;
std::vector<size_t> refused;  // sizes of the blocks in use when a request was refused
size_t live = 0, peak = 0, limit = 0;

bool is_gloo() {
  thread_local const bool found = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::strncmp(name, "pt_gloo", 7) == 0;
  }();
  return found;
}

void release(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(guard);
    auto block = blocks.find(pointer);
    if (block != blocks.end()) {  // oneDNN releases empty blocks too
      live -= block->second;
      blocks.erase(block);
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (is_gloo()) return c10::GetDefaultCPUAllocator()->allocate(size);
    {
      std::lock_guard<std::mutex> lock(guard);
      if (limit != 0 && live + size > limit) {
        refused.clear();
        for (auto& [pointer, held] : blocks) refused.push_back(held);
      }
      TORCH_CHECK_WITH(
          OutOfMemoryError, limit == 0 || live + size <= limit,
          "the counting allocator: ", live, " bytes are in use, ", size, " more exceed the limit of ", limit);
      live += size;
      peak = std::max(peak, live);
    }
    void* pointer = c10::GetDefaultCPUAllocator()->raw_allocate(size);
    if (pointer != nullptr) {  // nothing is allocated for an empty tensor
      std::lock_guard<std::mutex> lock(guard);
      blocks[pointer] = size;
    }
    return {pointer, pointer, pointer == nullptr ? &c10::detail::deleteNothing : &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
};

Counting counting;

}  // namespace

extern "C" {

void count_allocations() { c10::SetCPUAllocator(&counting, /*priority=*/100); }

void stop_counting() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/100); }

size_t live_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return live;
}

size_t peak_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return peak;
}

void reset_peak() {
  std::lock_guard<std::mutex> lock(guard);
  peak = live;
}

void set_limit(size_t bytes) {
  std::lock_guard<std::mutex> lock(guard);
  limit = bytes;
}

size_t bytes_at(void* pointer) {  // 0 if the allocator does not own it
  std::lock_guard<std::mutex> lock(guard);
  auto block = blocks.find(pointer);
  return block == blocks.end() ? 0 : block->second;
}

size_t blocks_at_refusal(size_t* sizes, size_t most) {  // writes up to `most` sizes, returns how many there are
  std::lock_guard<std::mutex> lock(guard);
  std::copy_n(refused.begin(), std::min(most, refused.size()), sizes);
  return refused.size();
}

}
