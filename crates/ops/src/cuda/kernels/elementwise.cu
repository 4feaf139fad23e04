// Operations that treat every element alike.

DEVICE f32 load_any(const void* p, u32 is_bf16, u64 i) { return is_bf16 ? load(((const bf16*)p)[i]) : ((const f32*)p)[i]; }
DEVICE void store_any(void* p, u32 is_bf16, u64 i, f32 x) {
    if (is_bf16) store(((bf16*)p)[i], x);
    else ((f32*)p)[i] = x;
}

#define FOR_EACH(i, len) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (len); i += (u64)gridDim.x * blockDim.x)

KERNEL(256) cast_elements(const void* x, u32 x_bf16, void* y, u32 y_bf16, u32 len) {
    FOR_EACH(i, len) store_any(y, y_bf16, i, load_any(x, x_bf16, i));
}
