//! `--device`: the same results on every device, and a one-line error if there is no GPU.

use moeworks_gpu::{Emulation, Gpu, GpuOptions};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, losses, stderr, stdout};

#[test]
fn a_device_that_is_not_there_is_named_and_auto_goes_on_without() {
    let work = Workplace::new();
    refused(&work, &["train", "--data", "text.txt", "--device", "cuda:999"], &["train.device", "GPU"]);
    refused(&work, &["train", "--data", "text.txt", "--set", "train.device=gpu"], &["train.device", "cuda:N"]);
    let typed = work.run(&["generate", "run", "--device", "gpu"]);
    assert_eq!(typed.status.code(), Some(2));
    assert!(stderr(&typed).contains("must be cpu, cuda, cuda:N or auto"), "{}", stderr(&typed));
    let trained = work.train("run", 2, &["--device", "auto"]);
    assert_success(&trained);
    refused(&work, &["generate", "run", "--expert-cache", "2"], &["--expert-cache 2", "GPU"]);
    refused(&work, &["generate", "run", "--expert-room", "2"], &["--expert-cache 2", "GPU"]);
    for size in ["-1", "nan", "1e9"] {
        refused(&work, &["generate", "run", &format!("--expert-cache={size}")], &["--expert-cache", "at least 0"]);
    }
    refused(&work, &["generate", "run", "--device", "cuda:999"], &["GPU"]);
    let generated = work.run(&["generate", "run", "--max-tokens", "2", "--device", "auto"]);
    assert_success(&generated);
    if Gpu::open(0, &GpuOptions::for_tests()).is_err() {
        for said in [stderr(&trained), stderr(&generated)] {
            assert!(said.contains("auto computes on the processor: "), "{said}");
        }
    }
}

#[test]
fn an_optimizer_in_the_hosts_memory_makes_the_steps_of_one_on_the_gpu() {
    if let Err(missing) = Gpu::emulated(Emulation::default(), &GpuOptions::for_tests()) {
        println!("SKIPPED: training with an offloaded optimizer: {missing}");
        return;
    }
    let work = Workplace::new();
    for precision in ["f32", "bf16"] {
        let precision = format!("train.precision={precision}");
        let [kept, offloaded] = ["false", "true"].map(|offload| {
            let (run, setting) = (format!("{offload}-{precision}"), format!("train.offload_optimizer={offload}"));
            let more = ["--set", &precision, "--set", &setting, "--set", "train.seq_len=16", "--device", "emulated"];
            assert_success(&work.train(&run, 4, &more));
            losses(&work.path(&run))
                .into_iter()
                .map(|(_, loss)| loss.parse::<f64>().expect("a number"))
                .collect::<Vec<_>>()
        });
        for (kept, offloaded) in kept.iter().zip(&offloaded) {
            assert!((kept - offloaded).abs() <= 1e-4 * kept, "{precision}: {offloaded}, not {kept}");
        }
    }
}

#[test]
fn a_gpu_trains_evaluates_and_generates_what_the_processor_does() {
    let options = &GpuOptions::for_tests();
    let emulated = Gpu::emulated(Emulation::default(), options);
    let [plain, hopper] = ["emulated", "emulated-hopper"].map(|name| emulated.as_ref().map(|_| name));
    let gpu = Gpu::open(0, options);
    let devices = [plain, hopper, gpu.as_ref().map(|_| "cuda")];
    let work = Workplace::new();
    for precision in ["f32", "bf16"] {
        let precision = format!("train.precision={precision}");
        let train = |run: &str, device: &str| {
            let more = ["--set", &precision, "--set", "train.seq_len=16", "--device", device];
            assert_success(&work.train(run, 3, &more));
            losses(&work.path(run)).into_iter().map(|(_, loss)| loss.parse::<f64>().expect("a number"))
        };
        let cpu = format!("cpu-{precision}");
        let expected: Vec<f64> = train(&cpu, "cpu").collect();
        for device in &devices {
            let Ok(device) = device.as_ref().inspect_err(|missing| println!("SKIPPED: training on it: {missing}"))
            else {
                continue;
            };
            let tolerance = if precision.ends_with("f32") { 1e-5 } else { 1e-3 };
            for (loss, expected) in train(&format!("{device}-{precision}"), device).zip(&expected) {
                assert!((loss - expected).abs() <= tolerance * expected, "{device}: {loss}, not {expected}");
            }
            let texts = ["cpu", device].map(|device| {
                let args = ["generate", &cpu, "--temperature", "0", "--max-tokens", "6", "--device", device];
                let output = work.run(&[&args[..], &["--prompt", "Line 1"]].concat());
                assert_success(&output);
                stdout(&output)
            });
            assert_eq!(texts[0], texts[1], "{device}");
            let args = ["generate", &cpu, "--temperature", "0", "--max-tokens", "6", "--device", device];
            let offloaded = work.run(&[&args[..], &["--prompt", "Line 1", "--expert-cache", "0.001"]].concat());
            assert_success(&offloaded);
            assert_eq!(stdout(&offloaded), texts[0], "{device} with experts in the host's memory");
            let evaluated = ["cpu", device].map(|device| {
                let args =
                    ["evaluate", &cpu, "--data", "text.txt", "--max-sequences", "2", "--device", device, "--json"];
                let output = work.run(&args);
                assert_success(&output);
                let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
                value["loss"].as_f64().expect("a loss")
            });
            assert!((evaluated[0] - evaluated[1]).abs() <= 1e-4 * evaluated[0], "{device}: {evaluated:?}");
        }
    }
}
