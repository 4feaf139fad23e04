use super::*;

#[test]
fn every_rate_is_measured_on_every_instruction_set() {
    for ctx in crate::test_data::gpus() {
        let peaks = measure(&ctx);
        let has_fp8 = ctx.gpu().is_some_and(|gpu| gpu.hopper_processors().is_some());
        assert!(!has_fp8 || peaks.fp8_flops > Some(0.0), "{peaks:?}");
        assert!(peaks.f32_flops > 0.0 && peaks.bf16_flops > Some(0.0) && peaks.read_bytes_per_s > 0.0, "{peaks:?}");
    }
    for isa in Isa::available() {
        let peaks = measure(&Context::cpu(2).with_isa(isa));
        assert!(peaks.f32_flops > 1e8 && peaks.read_bytes_per_s > 1e7, "{isa:?}: {peaks:?}");
        assert_eq!(peaks.bf16_flops.is_some(), Isa::best() >= Isa::Avx512Bf16);
        assert!(peaks.flops(DType::BF16) >= peaks.flops(DType::F32));
        assert_eq!(peaks.f32_in_tiles_flops.is_some(), isa == Isa::AmxF32);
    }
}
