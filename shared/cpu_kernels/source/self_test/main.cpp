// Tries every kernel against plain loops, in both element types: `build.py --self-test`. It needs
// neither Python nor torch, so it also runs under an emulator of a machine that is not at hand.
//
// Sizes lie at the edges of vectors, register tiles, panels and pages. Of every kernel a row's bits
// must be the same whatever rows are beside it.

#include "../admission.h"
#include "check_attention_order.h"
#include "check_coded_attention.h"
#include "check_pool.h"
#include "check_quantized.h"
#include "check_segments.h"
#include "digest.h"

namespace {

template <class T>
void check_all() {
    self_test::check_linear<T>();
    self_test::check_segments<T>();
    self_test::check_steps<T>();
    self_test::check_sketch<T>();
    self_test::check_quantized<T>();
#if TESSERA_TILES
    self_test::check_code_tiles<T>();
#endif
    self_test::check_norms<T>();
    self_test::check_cache<T>();
    self_test::check_rope<T>();
    self_test::check_attention<T>();
    self_test::check_attention_order<T>();
    self_test::check_coded_attention<T>();
    self_test::check_layer<T>();
}

}  // namespace

// Given "digests", only these are printed.
int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a crash is told from the last line
    std::printf("%d lanes, panels of %d columns, pages of %d tokens\n", tessera::LANES,
                tessera::PANEL, tessera::PAGE);
#if defined(TESSERA_EMULATED_TILES)
    constexpr int EXPECTED = tessera::EMULATED;
#else
    constexpr int EXPECTED = tessera::ADMITTED;
#endif
    if (const int refused = tessera_admit(); refused != EXPECTED) {
        std::printf("not admitted: %d (`admission.h`)\n", refused);
        return 1;
    }
    tessera_start(2);
    if (argc < 2 || std::strcmp(argv[1], "digests")) {
        self_test::check_pool();
        check_all<tessera::Float32>();
        check_all<tessera::BFloat16>();
    }
    std::printf("digests %016llx %016llx\n", (unsigned long long)self_test::digest_of_all<tessera::Float32>(),
                (unsigned long long)self_test::digest_of_all<tessera::BFloat16>());
    return self_test::Check::failed;
}
