"""The package without PyTorch: models, training, the program, and what is missing or wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import SkipTest

import moeworks

TINY = {
    "model": {
        "width": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "top_k": 2,
        "expert_width": 32,
        "max_seq_len": 64,
    },
    "train": {"steps": 6, "seq_len": 32, "batch_size": 4},
    "data.tokenizer": "bytes",
}
FOLDER = Path(tempfile.mkdtemp(prefix="moeworks-python-"))
TEXT = FOLDER / "text.txt"
TEXT.write_text("the quick brown fox jumps over the lazy dog. " * 400)
EVENTS = []
RUN = moeworks.train(TINY, data=TEXT, out=FOLDER / "run", on_event=EVENTS.append)
MODEL, TOKENIZER = moeworks.load(RUN.path)


def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), f"{error} lacks {words!r}"
        assert "\n" not in str(error)
        return
    raise AssertionError(f"no {kind.__name__}")


def python(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, **options)


def test_the_package_needs_no_pytorch():
    code = "import sys; sys.modules['torch'] = None; import moeworks; print(moeworks.__version__, moeworks.describe())"
    done = python("-c", code)
    assert done.returncode == 0 and moeworks.__version__ in done.stdout, done.stderr


def test_missing_pytorch_and_transformers_name_the_version_wanted():
    for module, missing, words in [
        ("ops", "torch", "PyTorch 2.10"),
        ("nn", "torch", "PyTorch 2.10"),
        ("transformers", "torch", "PyTorch 2.10"),
    ]:
        done = python("-c", f"import sys; sys.modules['{missing}'] = None; import moeworks.{module}")
        assert done.returncode == 1 and words in done.stderr.splitlines()[-1], done.stderr


def test_training_tells_its_events_and_leaves_a_run():
    steps = [event for event in EVENTS if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 7)) and steps[0]["total_steps"] == 6
    assert all(event["loss"] > 0 and len(event["layers"]) == 2 for event in steps)
    assert any(event["event"] == "saved" for event in EVENTS)
    assert RUN.is_finished and RUN.step == 6 and len(RUN.metrics()) == 6


def test_a_run_is_resumed():
    run = moeworks.train(TINY, data=TEXT, out=FOLDER / "more", overrides={"train.steps": 2})
    run = moeworks.train(resume=run.path, overrides={"train.steps": 4})
    assert run.step == 4 and run.is_finished


def test_an_exception_of_the_listener_stops_the_run_and_is_passed_on():
    class Enough(Exception):
        pass

    def listen(event):
        if event["event"] == "step" and event["step"] == 3:
            raise Enough

    out = FOLDER / "stopped"
    try:
        moeworks.train(TINY, data=TEXT, out=out, on_event=listen)
    except Enough:
        assert moeworks.load(out)
    else:
        raise AssertionError("no exception")


def test_generation_is_the_sum_of_its_stream():
    settings = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
    text = moeworks.generate(MODEL, TOKENIZER, "the quick", **settings)
    parts = list(moeworks.stream_generate(MODEL, TOKENIZER, "the quick", **settings))
    assert "".join(part.text for part in parts) == text
    assert parts[-1].finish_reason in ("length", "stop") and parts[-1].prompt_tokens == 9
    assert all(part.finish_reason is None for part in parts[:-1])
    ids = TOKENIZER.encode("the quick")
    assert moeworks.generate(MODEL, TOKENIZER, ids, **settings) == text
    assert TOKENIZER.decode(ids) == "the quick"


def test_evaluation_and_generation_tell_which_experts_tokens_went_to():
    try:
        import numpy as np
    except ImportError as error:
        raise SkipTest(str(error)) from error
    found = moeworks.evaluate(MODEL, TEXT, seq_len=32, max_sequences=4, routing=True)
    routing = found.pop("routing")
    assert found == moeworks.evaluate(MODEL, TEXT, seq_len=32, max_sequences=4)
    assert [layer.layer for layer in routing] == [layer["layer"] for layer in found["layers"]]
    for layer, told in zip(routing, found["layers"], strict=True):
        assert layer.expert_ids.shape == (128, 2) and layer.loads.tolist() == told["tokens_per_expert"]
        assert np.allclose(layer.expert_weights.sum(1), 1.0, atol=2e-3) and abs(layer.cv - told["cv"]) < 1e-6
    assert routing.loads.shape == (2, 4) and not routing[0].dropped.any()
    page = routing._repr_html_()
    assert page.count("<td title=") == 8 and "<script" not in page and "http" not in page
    settings = {"max_tokens": 5, "stop": "never said"}
    text, routing = moeworks.generate(MODEL, TOKENIZER, "the quick", routing=True, **settings)
    assert text == moeworks.generate(MODEL, TOKENIZER, "the quick", **settings)
    # The last token is not read again.
    assert len(routing) == 2 and routing[0].expert_ids.shape[0] in (9 + 4, 9 + 5), routing
    *parts, last = moeworks.stream_generate(MODEL, TOKENIZER, "the quick", routing=True, **settings)
    assert all(part.routing is None for part in parts) and last.routing.loads.tolist() == routing.loads.tolist()
    stream = moeworks.stream_generate(MODEL, TOKENIZER, "the quick", routing=True, **settings)
    next(stream)
    stream.close()


def test_a_stream_can_be_left():
    for _ in range(5):
        next(moeworks.stream_generate(MODEL, TOKENIZER, "a", max_tokens=50))


def test_the_program_and_python_give_the_same_text():
    done = python("-m", "moeworks", "generate", RUN.path, "--prompt", "the", "--max-tokens", "8", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    text = moeworks.generate(MODEL, TOKENIZER, "the", max_tokens=8)
    printable = [char for char in "the" + text if char.isalnum()]
    assert [char for char in done.stdout if char.isalnum()] == printable, (done.stdout, text)


def test_a_chat_goes_by_the_models_template():
    folder = Path(tempfile.mkdtemp(dir=FOLDER)) / "chat"
    moeworks.convert(RUN.path, folder)
    raises(ValueError, "no chat template", lambda: moeworks.chat(MODEL, TOKENIZER, [{"role": "user", "content": "a"}]))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    model, tokenizer = moeworks.load(folder)
    messages = [{"role": "user", "content": "hello"}]
    answer = moeworks.chat(model, tokenizer, messages, max_tokens=5)
    assert answer == moeworks.generate(model, tokenizer, "user: hello\n", max_tokens=5)
    raises(TypeError, "messages", lambda: moeworks.chat(model, tokenizer, "hello"))


def test_evaluation_inspection_and_conversion():
    found = moeworks.evaluate(MODEL, TEXT, max_sequences=2)
    assert found["tokens"] == 128 and found["loss"] > 0 and len(found["layers"]) == 2
    assert moeworks.evaluate(RUN.path, [TEXT], max_sequences=2) == found
    assert moeworks.inspect(RUN.path)["model"]["num_experts"] == 4
    line = moeworks.convert(RUN.path, FOLDER / "half", dtype="bf16")
    assert "half" in line and "bf16" in moeworks.inspect(FOLDER / "half")["stored_bytes"]
    raises(ValueError, "half", lambda: moeworks.convert(RUN.path, FOLDER / "half"))
    assert moeworks.convert(RUN.path, FOLDER / "half", force=True)


def test_a_gpu_that_is_missing_is_named_in_one_line():
    if Path("/dev/nvidiactl").exists():
        raise SkipTest("there is a GPU")
    on_gpu = {"train.device": "cuda"}
    raises(ValueError, "NVIDIA driver", lambda: moeworks.load(RUN.path, device="cuda"))
    raises(ValueError, "NVIDIA driver", lambda: moeworks.train(TINY, data=TEXT, out=FOLDER / "x", overrides=on_gpu))
    assert "threads" in moeworks.load(RUN.path, device="auto")[0].device


def test_the_emulated_gpu_trains_and_generates_as_the_cpu_does():
    if "MOEWORKS_NO_EMULATION" in os.environ:
        raise SkipTest("MOEWORKS_NO_EMULATION is set")
    if shutil.which("c++") is None:
        raise SkipTest("the emulation needs a compiler for C++")
    model, _ = moeworks.load(RUN.path, device="emulated")
    assert "emulation" in model.device
    wanted = moeworks.generate(MODEL, TOKENIZER, "the ", max_tokens=8)
    assert moeworks.generate(model, TOKENIZER, "the ", max_tokens=8) == wanted
    losses = []
    for device in ("cpu", "emulated"):
        small = {"train.steps": 2, "train.seq_len": 8, "train.batch_size": 1, "train.device": device}
        events = []
        moeworks.train(TINY, data=TEXT, out=FOLDER / f"on-{device}", overrides=small, on_event=events.append)
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert len(losses[0]) == 2 and all(abs(a - b) < 1e-3 for a, b in zip(*losses, strict=True)), losses


def test_wrong_arguments_raise_clear_exceptions():
    nowhere = str(FOLDER / "nowhere")
    model = (MODEL, TOKENIZER)
    generate = moeworks.generate
    wrong = [
        (FileNotFoundError, "nowhere", lambda: moeworks.load(nowhere)),
        (FileNotFoundError, "nowhere", lambda: moeworks.inspect(nowhere)),
        (FileNotFoundError, "nowhere", lambda: moeworks.convert(nowhere, FOLDER / "x")),
        (FileNotFoundError, "nowhere", lambda: moeworks.evaluate(MODEL, nowhere)),
        (FileNotFoundError, "nowhere", lambda: moeworks.train("tiny", data=nowhere, out=FOLDER / "x")),
        (FileNotFoundError, "nowhere", lambda: moeworks.train(f"{nowhere}.toml", out=FOLDER / "x")),
        (ValueError, "text.txt", lambda: moeworks.load(TEXT)),
        (ValueError, "dtype", lambda: moeworks.load(RUN.path, dtype="int3")),
        (ValueError, "device", lambda: moeworks.load(RUN.path, device="tpu")),
        (ValueError, "threads", lambda: moeworks.load(RUN.path, num_threads=0)),
        (ValueError, "threads", lambda: moeworks.set_num_threads(5000)),
        (TypeError, "whole number", lambda: moeworks.set_num_threads("2")),
        (TypeError, "", lambda: moeworks.load(5)),
        (ValueError, "temperature", lambda: generate(*model, "a", temperature=-1)),
        (ValueError, "top_p", lambda: generate(*model, "a", top_p=2.0)),
        (ValueError, "max_tokens", lambda: generate(*model, "a", max_tokens=-1)),
        (ValueError, "context", lambda: generate(*model, "a", max_tokens=500)),
        (ValueError, "context", lambda: generate(*model, "a" * 500)),
        (ValueError, "empty", lambda: generate(*model, [])),
        (ValueError, "vocabulary", lambda: generate(*model, [9999])),
        (TypeError, "prompt", lambda: generate(*model, 5)),
        (TypeError, "model", lambda: generate("model", TOKENIZER, "a")),
        (ValueError, "preset", lambda: moeworks.train("enormous", out=FOLDER / "x")),
        (ValueError, "model.size", lambda: moeworks.train({"model": {"size": 3}}, data=TEXT, out=FOLDER / "x")),
        (ValueError, "out", lambda: moeworks.train(TINY, data=TEXT)),
        (ValueError, "run", lambda: moeworks.train(TINY, data=TEXT, out=RUN.path)),
        (ValueError, "ranks", lambda: moeworks.train(TINY, overrides={"parallel.dp": 2}, data=TEXT, out=FOLDER / "x")),
        (ValueError, "dtype", lambda: moeworks.convert(RUN.path, FOLDER / "x", dtype="f8")),
        (TypeError, "list", lambda: moeworks.run("inspect x")),
    ]
    for kind, words, call in wrong:
        raises(kind, words, call)


def test_the_program_runs_twice_in_a_process_with_its_exit_codes():
    code = "import moeworks; print(moeworks.run(['--version']), moeworks.run(['inspect', '/no/model']))"
    done = python("-c", code)
    assert done.stdout.split()[-2:] == ["0", "2"] and "error: " in done.stderr, done
    for words, code in ((["--version"], 0), (["inspect", "/no/model"], 2), (["no-such-command"], 2)):
        assert python("-m", "moeworks", *words).returncode == code


def test_ctrl_c_ends_the_program_and_a_run_in_python():
    long = {**TINY, "train": {**TINY["train"], "steps": 1_000_000}}
    config = json.dumps(long)
    code = (
        "import json, sys, moeworks\n"
        "try:\n"
        "    moeworks.train(json.loads(sys.argv[1]), data=sys.argv[2], out=sys.argv[3],\n"
        "        on_event=lambda e: print(e['event'], flush=True))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    words = [sys.executable, "-c", code, config, str(TEXT), str(FOLDER / "interrupted")]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and out.endswith("interrupted\n"), out[-200:]
    assert moeworks.load(FOLDER / "interrupted")
    child = subprocess.Popen(
        [sys.executable, "-m", "moeworks", "chat", RUN.path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    time.sleep(1.0)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    # A busy machine may not have come to its handlers, so that the signal itself ends the program.
    assert child.returncode in (143, 0, 2, -signal.SIGTERM), child.returncode


def test_a_forked_process_generates_and_ends():
    wanted = moeworks.generate(MODEL, TOKENIZER, "the", max_tokens=6)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if moeworks.generate(MODEL, TOKENIZER, "the", max_tokens=6) == wanted else 1)
        finally:
            os._exit(2)
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        raise AssertionError("the child hangs")
    assert status == 0


def test_the_stub_names_every_native_function():
    from moeworks import _native

    stub = (Path(moeworks.__file__).parent / "_native.pyi").read_text()
    functions = {name for name in vars(_native) if not name.startswith("_")}
    named = {line.split("(")[0].removeprefix("def ") for line in stub.splitlines() if line.startswith("def ")}
    assert functions == named, functions ^ named
