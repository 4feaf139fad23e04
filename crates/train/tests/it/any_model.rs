//! Tests of the trainer with a model that is not a decoder.

mod classifier;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use moeworks_comm::{Communicator, RankOptions, try_run_ranks};
use moeworks_model::ParamSet;
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_plan::{Exchange, Layout, Placement, Wire};
use moeworks_train::lr_schedule::{Decay, LrSchedule};
use moeworks_train::metrics::{METRICS_JSONL, Record, read_records};
use moeworks_train::task::{Microbatch, ModelView, PassFigures, PassGradients};
use moeworks_train::{
    Event, Outcome, Ranks, Requests, ResumeOptions, RunFolder, StartOptions, Task, TrainError, Trainer, TrainerSettings,
};

use classifier::{BALANCE, Classifier, NUM_CLASSES, NUM_POINTS, Weights};

fn settings(steps: u64) -> TrainerSettings {
    let decay = Decay::Cosine;
    TrainerSettings {
        steps,
        grad_accumulation: 2,
        lr: LrSchedule { peak: 2e-2, min_ratio: 0.1, warmup_steps: 5, total_steps: steps, decay },
        eval_every: 50,
        ..TrainerSettings::default()
    }
}

/// Starts a run in a new folder.
fn start(run_dir: &Path, steps: u64, frozen: &[&str], ranks: Option<Arc<Ranks>>) -> Trainer<Classifier> {
    let task = Classifier::new(ranks.as_deref(), frozen);
    let folder = RunFolder::from(run_dir.to_owned());
    Trainer::start(task, StartOptions { folder, settings: settings(steps), ctx: Context::cpu(1), ranks })
        .expect("a run")
}

fn resume(run_dir: &Path, steps: u64, ranks: Option<Arc<Ranks>>) -> Trainer<Classifier> {
    let task = Classifier::new(ranks.as_deref(), &[]);
    let (run_dir, settings) = (run_dir.to_owned(), settings(steps));
    Trainer::resume(task, ResumeOptions { run_dir, settings, ctx: Context::cpu(1), ranks }).expect("the run goes on")
}

/// Trains until all steps, or step `last`, are done.
fn run_until(trainer: &mut Trainer<Classifier>, last: u64) -> Outcome {
    let requests = Requests::default();
    let stop = Arc::clone(&requests.stop);
    let on_event = &mut |event: Event<'_>| {
        if let Event::Step { record, .. } = event {
            stop.store(record.step == last, Ordering::SeqCst);
        }
    };
    trainer.run(&requests, on_event).expect("trained")
}

/// Runs `work` on each rank of a layout.
fn on_ranks(layout: Layout, zero: u8, work: impl Fn(Arc<Ranks>) + Sync) {
    let result = try_run_ranks(&RankOptions::new(layout.num_ranks()), |comm: &dyn Communicator| {
        let placement = Placement::sharded(4, layout.ep);
        let ranks = Ranks::new(comm, layout, placement, Exchange::plain(Wire::F32))?.with_zero(zero);
        work(Arc::new(ranks));
        Ok::<_, TrainError>(())
    });
    result.expect("the ranks talk");
}

fn records(run_dir: &Path) -> Vec<Record> {
    read_records(&run_dir.join(METRICS_JSONL)).expect("records").collect::<Result<_, _>>().expect("whole lines")
}

fn metric(record: &Record, name: &str) -> Option<f64> {
    record.metrics.iter().find(|metric| metric.name == name).map(|metric| metric.value)
}

/// Reads the files of the newest checkpoint that determine the next steps.
fn checkpoint(trainer: &Trainer<Classifier>) -> [Vec<u8>; 2] {
    let dir = trainer.last_checkpoint().expect("a checkpoint");
    ["model.safetensors", "optimizer.safetensors"].map(|name| fs::read(dir.join(name)).expect("a file"))
}

/// Removes the timings from the record of a step.
fn without_times(record: Record) -> Record {
    let Record { step, tokens, loss, balance_loss, grad_norm, lr, val_loss, metrics, layers, .. } = record;
    Record { step, tokens, loss, balance_loss, grad_norm, lr, val_loss, metrics, layers, ..Record::default() }
}

#[test]
fn a_classifier_learns_its_classes_and_records_its_accuracy() {
    let folder = tempfile::tempdir().expect("a folder");
    let run_dir = folder.path().join("run");
    let mut trainer = start(&run_dir, 200, &[], None);
    assert_eq!(run_until(&mut trainer, 0), Outcome::Finished);
    let records = records(&run_dir);
    let chance = (NUM_CLASSES as f64).ln();
    for record in records.iter().filter(|record| record.val_loss.is_some()) {
        let [train, val] = ["train/accuracy", "val/accuracy"].map(|name| metric(record, name).expect("an accuracy"));
        println!("step {:3}: loss {:.3}, accuracy {train:.3}, held out {val:.3}", record.step, record.loss);
    }
    assert!((records[0].loss - chance).abs() < 0.5, "{} at first, {chance} by chance", records[0].loss);
    let last = records.last().expect("a record");
    assert!(last.val_loss.expect("an evaluation") < 0.2 * chance, "{:?}", last.val_loss);
    assert!(metric(last, "val/accuracy").expect("an accuracy") > 0.9);
    assert_eq!(metric(&records[1], "val/accuracy"), None, "only where there was an evaluation");
    assert_eq!((last.step, last.tokens), (200, 200 * 2 * NUM_POINTS as u64));
    assert_eq!(last.layers[0].tokens_per_expert.iter().sum::<u64>(), 2 * 2 * NUM_POINTS as u64);
    let header = fs::read_to_string(run_dir.join("metrics.csv")).expect("a table");
    assert!(header.lines().next().expect("a header").contains(",train/accuracy,val/accuracy,"));
}

#[test]
fn a_classifier_on_ranks_makes_the_steps_of_one_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    run_until(&mut start(&folder.path().join("one"), 6, &[], None), 0);
    let one = records(&folder.path().join("one"));
    for (index, (dp, ep, zero)) in [(2, 1, 0), (2, 1, 1), (2, 1, 2), (1, 2, 0), (2, 2, 2)].into_iter().enumerate() {
        let layout = Layout::new(dp, ep, 1);
        let run_dir = folder.path().join(index.to_string());
        on_ranks(layout, zero, |ranks| _ = run_until(&mut start(&run_dir, 6, &[], Some(ranks)), 0));
        for (many, one) in records(&run_dir).iter().zip(&one) {
            let near = |what: &str, a: f64, b: f64| {
                assert!(
                    (a - b).abs() <= 2e-5 * b.abs(),
                    "{layout:?}, ZeRO {zero}, step {}: {what} {a}, not {b}",
                    one.step
                );
            };
            near("loss", many.loss, one.loss);
            near("balance loss", many.balance_loss, one.balance_loss);
            near("norm", many.grad_norm, one.grad_norm);
            assert_eq!(many.layers[0].tokens_per_expert, one.layers[0].tokens_per_expert);
            assert_eq!(many.metrics, one.metrics, "{layout:?}, ZeRO {zero}");
            assert_eq!(many.tokens, one.tokens);
        }
    }
}

#[test]
fn a_resumed_run_makes_the_same_steps_bit_for_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let [whole_dir, parts_dir] = ["whole", "parts"].map(|name| folder.path().join(name));
    let mut whole = start(&whole_dir, 12, &[], None);
    run_until(&mut whole, 0);
    let mut first = start(&parts_dir, 12, &[], None);
    assert_eq!(run_until(&mut first, 5), Outcome::Stopped);
    drop(first);
    let mut second = resume(&parts_dir, 12, None);
    assert_eq!(second.progress().step, 5);
    assert_eq!(run_until(&mut second, 0), Outcome::Finished);
    assert!(checkpoint(&second) == checkpoint(&whole), "weights, the router's biases and moments have the same bits");
    let [whole, parts] = [whole_dir, parts_dir].map(|dir| records(&dir).into_iter().map(without_times).collect());
    let (whole, parts): (Vec<Record>, Vec<Record>) = (whole, parts);
    assert_eq!(whole.len(), 12);
    assert!(whole.iter().zip(&parts).all(|(a, b)| format!("{a:?}") == format!("{b:?}")), "every figure is the same");
}

#[test]
fn a_run_of_two_ranks_goes_on_as_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let [one_dir, ranks_dir] = ["one", "ranks"].map(|name| folder.path().join(name));
    run_until(&mut start(&one_dir, 8, &[], None), 0);
    on_ranks(Layout::new(1, 2, 1), 1, |ranks| _ = run_until(&mut start(&ranks_dir, 8, &[], Some(ranks)), 4));
    run_until(&mut resume(&ranks_dir, 8, None), 0);
    let [one, ranks] = [one_dir, ranks_dir].map(|dir| records(&dir).pop().expect("a record"));
    assert_eq!((ranks.step, one.step), (8, 8));
    assert!((ranks.loss - one.loss).abs() <= 1e-4 * one.loss, "{} and {}", ranks.loss, one.loss);
}

#[test]
fn frozen_weights_do_not_move_and_have_no_moments() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut trainer = start(&folder.path().join("run"), 4, &["input.weight", "*.experts.*"], None);
    let bits = |trainer: &Trainer<Classifier>| -> Vec<Vec<u8>> {
        trainer.params().params().into_iter().map(|tensor| tensor.bytes().to_vec()).collect()
    };
    let before = bits(&trainer);
    run_until(&mut trainer, 0);
    for ((spec, before), after) in trainer.task().table().specs().iter().zip(before).zip(bits(&trainer)) {
        assert_eq!(before == after, !spec.is_trainable, "{}", spec.name);
    }
    let [_, moments] = checkpoint(&trainer);
    let text = String::from_utf8_lossy(&moments);
    assert!(text.contains("first.output.weight") && !text.contains("first.input.weight"));
}

#[test]
fn what_a_task_does_not_support_on_ranks_is_refused() {
    let result = try_run_ranks(&RankOptions::new(2), |comm: &dyn Communicator| {
        let (layout, exchange) = (Layout::new(2, 1, 1), Exchange::plain(Wire::F32));
        let ranks = Arc::new(Ranks::new(comm, layout, Placement::sharded(4, 1), exchange)?.with_zero(3));
        let folder = tempfile::tempdir().expect("a folder");
        let options = StartOptions {
            folder: RunFolder::from(folder.path().join("run")),
            settings: settings(1),
            ctx: Context::cpu(1),
            ranks: Some(Arc::clone(&ranks)),
        };
        let error = Trainer::start(Classifier::new(Some(&ranks), &[]), options).err().expect("refused");
        Ok::<_, TrainError>(error.to_string())
    });
    let messages = result.expect("the ranks talk");
    assert!(
        messages.iter().all(|message| message == "this task does not support sharded weights (ZeRO 3)"),
        "{messages:?}"
    );
}

/// Computes the loss, its gradients, and the routing at which they hold.
fn pass(task: &mut Classifier, ctx: &Context, weights: &Weights, grads: &mut Weights) -> (f64, PassFigures) {
    let model = ModelView { ctx, ranks: None, params: weights };
    let batch = Microbatch { step: 3, index: 0, num: 1, progress: 0.5 };
    let gradients = PassGradients { write: Write::Replace, grads, layer_done: &mut |_, _| () };
    let figures = task.train_pass(&model, batch, gradients).expect("a pass");
    (figures.mean_loss() + f64::from(BALANCE) * figures.balance_loss, figures)
}

#[test]
fn the_gradient_of_the_classifier_is_that_of_differences() {
    let (ctx, mut task) = (Context::cpu(1), Classifier::new(None, &[]));
    let mut weights = task.first_params(&ctx, 1, &mut |_, tensor| tensor.clone()).expect("weights");
    let table = Arc::clone(task.table());
    let [mut grads, mut unused] = [0, 1].map(|_| weights.gradients(&ctx, &table, moeworks_tensor::DType::F32));
    let (_, figures) = pass(&mut task, &ctx, &weights, &mut grads);
    let routing = |figures: &PassFigures| figures.layers[0].tokens_per_expert.clone();
    let mut num_checked = 0;
    for spec in table.specs() {
        let analytic = grads.params()[spec.index].f32s().to_vec();
        let scale = analytic.iter().fold(0.0_f32, |most, grad| most.max(grad.abs()));
        for at in (0..analytic.len()).step_by(analytic.len().div_ceil(12)) {
            let mut moved = |by: f32| {
                let value = weights.params()[spec.index].f32s()[at];
                weights.params_mut()[spec.index].f32s_mut()[at] = value + by;
                let result = pass(&mut task, &ctx, &weights, &mut unused);
                weights.params_mut()[spec.index].f32s_mut()[at] = value;
                result
            };
            let ((up, at_up), (down, at_down)) = (moved(5e-3), moved(-5e-3));
            // The loss is not differentiable where the choice of experts changes.
            if routing(&at_up) != routing(&figures) || routing(&at_down) != routing(&figures) {
                continue;
            }
            let difference = ((up - down) / 1e-2) as f32;
            let error = (difference - analytic[at]).abs();
            assert!(
                error <= 0.02 * scale + 1e-4,
                "{}[{at}]: {} but {difference} by differences",
                spec.name,
                analytic[at]
            );
            num_checked += 1;
        }
    }
    assert!(num_checked > 40, "{num_checked} derivatives were compared");
}
