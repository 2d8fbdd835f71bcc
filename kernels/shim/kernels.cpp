// The kernels, compiled for the CPU, and the functions that launch them by name.

#include "../rfd_step.cu"
#include "launch.hpp"

#include <cstring>

namespace {

struct Entry {
    const char* name;
    void (*kernel)(const RfdStep&, const RfdTable&);
};

#define RFD_ENTRY(NAME) {#NAME, NAME},
#define RFD_ENTRIES(NAME, ...) RFD_ENTRY(rfd_step_##NAME) RFD_ENTRY(rfd_norm_##NAME) RFD_ENTRY(rfd_update_##NAME)
#define RFD_SINGLE_ENTRY(NAME, PART) RFD_ENTRY(rfd_##NAME)

const Entry ENTRIES[] = {RFD_INSTANCES(RFD_ENTRIES) RFD_SINGLE_KERNELS(RFD_SINGLE_ENTRY)};

std::atomic<uint64_t> seed;

}  // namespace

extern "C" int rfd_shim_launch(const char* kernel, int cooperative, unsigned grid, const RfdStep* step,
                               const RfdTable* table)
{
    for (const Entry& entry : ENTRIES) {
        if (std::strcmp(entry.name, kernel) == 0) {
            if (grid == 0 || (cooperative != 0 && grid > shim::MOST_BLOCKS)) {
                return 2;
            }
            shim::launch({entry.kernel, step, table, grid, seed, nullptr}, cooperative != 0);
            return 0;
        }
    }
    return 1;
}

extern "C" void rfd_shim_seed(uint64_t value)
{
    seed = value;
}
