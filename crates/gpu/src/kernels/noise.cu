// Elements times random factors, by the generator of the processor's side: Philox4x32-10 (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011).

struct Words { u32 w[4]; };

DEVICE Words philox(u64 position, u32 key0, u32 key1, u32 stream0, u32 stream1) {
    u32 c0 = (u32)position, c1 = (u32)(position >> 32), c2 = stream0, c3 = stream1;
#pragma unroll
    for (u32 round = 0; round < 10; round++) {
        u64 low = (u64)0xD2511F53u * c0, high = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(high >> 32) ^ c1 ^ key0;
        c1 = (u32)high;
        c2 = (u32)(low >> 32) ^ c3 ^ key1;
        c3 = (u32)low;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}

// A thread has the elements whose positions are one modulo 16 in a group of 256: those of one call for bytes, and of
// two for halves of words (random.rs in `tensor`). `first` is the position of the first element's factor,
// `first_dropout` of its being left out.
KERNEL(256) times_factors(const void* x, u32 is_bf16, f32* to, u64 count, u64 first, u64 first_dropout, u32 key0, u32 key1, u32 stream0,
                          u32 stream1, f32 eps, f32 dropout) {
    u64 thread = (u64)blockIdx.x * 256 + threadIdx.x, group = first / 256 + thread / 16, lane = thread % 16;
    Words bytes = {}, halves[2] = {};
    if (eps > 0.0f) bytes = philox(group * 16 + lane, key0, key1, stream0, stream1);
    if (dropout > 0.0f) {
        u64 from = first_dropout / 256 + thread / 16;
#pragma unroll
        for (u32 half = 0; half < 2; half++) halves[half] = philox((from * 2 + half) * 16 + lane, key0, key1, stream0, stream1);
    }
    f32 lowest = 1.0f - eps + eps / 256.0f, growth = 1.0f / (1.0f - dropout);
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        u32 part = i / 4, word = i % 4;
        u64 position = group * 256 + i * 16 + lane;
        if (position < first || position - first >= count) continue;
        f32 factor = 1.0f;
        if (eps > 0.0f) factor = lowest + 2.0f * eps * ((f32)(bytes.w[word] >> (8 * part) & 0xff) * (1.0f / 256.0f));
        if (dropout > 0.0f) {
            f32 draw = (f32)(halves[part / 2].w[word] >> (16 * (part % 2)) & 0xffff) * (1.0f / 65536.0f);
            factor *= draw >= dropout ? growth : 0.0f;
        }
        u64 at = position - first;
        to[at] = load_any(x, is_bf16, at) * factor;
    }
}
