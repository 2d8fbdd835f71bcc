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
#define RFD_ENTRIES_OF_INSTANCE(NAME, I) RFD_ENTRY(rfd_step_##NAME) RFD_ENTRY(rfd_norm_##NAME) RFD_ENTRY(rfd_update_##NAME)

const Entry ENTRIES[] = {RFD_INSTANCES(RFD_ENTRIES_OF_INSTANCE) RFD_ENTRY(rfd_rescue_max) RFD_ENTRY(rfd_rescue_norm)
                             RFD_ENTRY(rfd_status) RFD_ENTRY(rfd_total) RFD_ENTRY(rfd_fill_masters)
                             RFD_ENTRY(rfd_store_table)};

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
