//! The files in `deploy/`: they fit the program's options, routes and metrics, and an image holds all that it needs.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::program::{Workplace, stderr, stdout};
use crate::python::python_with;
use crate::serve::{Server, with_model};
use crate::yaml::documents;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name)
}

fn manifests() -> Vec<Value> {
    let read = |name: &str| documents(&fs::read_to_string(file(name)).expect("a manifest"));
    ["kubernetes/serve.yaml", "kubernetes/gateway.yaml"].into_iter().flat_map(read).collect()
}

/// The pods that a manifest makes; none for other kinds.
fn pod(manifest: &Value) -> Option<&Value> {
    Some(&manifest["spec"]["template"]).filter(|pod| pod.is_object())
}

fn words(value: &Value) -> Vec<&str> {
    value.as_array().expect("a list").iter().map(|word| word.as_str().expect("a text")).collect()
}

fn after<'a>(args: &[&'a str], option: &str) -> &'a str {
    args[args.iter().position(|arg| *arg == option).unwrap_or_else(|| panic!("no {option}")) + 1]
}

/// Fails where the program does not take arguments. They end before anything listens: nobody has the model or the
/// address.
fn assert_taken(work: &Workplace, args: &[&str]) {
    let nowhere = |arg: &&str| match *arg {
        "0.0.0.0" => "203.0.113.1".to_owned(),
        arg => arg.to_owned(),
    };
    let args: Vec<String> = args.iter().map(nowhere).collect();
    let output = work.run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let message = stderr(&output);
    assert!(message.contains("--host 203.0.113.1 --port"), "{args:?}: {message}");
}

#[test]
fn manifests_fit_the_options_of_the_program_and_end_after_what_is_under_way() {
    let work = Workplace::new();
    for manifest in manifests() {
        let Some(pod) = pod(&manifest) else { continue };
        let container = &pod["spec"]["containers"][0];
        let args = words(&container["args"]);
        assert_taken(&work, &args);
        assert_eq!(container["ports"][0]["containerPort"].to_string(), after(&args, "--port"));
        let number = |value: &Value| value.as_u64().expect("a number");
        let shutdown: u64 = after(&args, "--shutdown-timeout").parse().expect("a number");
        let pre_stop = number(&container["lifecycle"]["preStop"]["sleep"]["seconds"]);
        assert!(number(&pod["spec"]["terminationGracePeriodSeconds"]) >= shutdown + pre_stop + 5);
        assert_eq!(manifest["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"]);
        let port = pod["metadata"]["annotations"].get("prometheus.io/port");
        assert!(port.is_none_or(|port| port == after(&args, "--port")));
    }
}

#[test]
fn probes_and_metrics_of_manifests_are_those_of_the_program() {
    let work = with_model();
    let server = Server::start(&work, &[]);
    let address = format!("http://{}", server.address);
    let gateway = Server::of(work.command(&["gateway", "--port", "0", "--to", &address]));
    let metrics = server.get("/metrics");
    for manifest in manifests() {
        if manifest["kind"] == "HorizontalPodAutoscaler" {
            let metric = manifest["spec"]["metrics"][0]["pods"]["metric"]["name"].as_str().expect("a name");
            assert!(metrics.contains(&format!("# TYPE {metric} gauge")), "{metric}");
        }
        let Some(pod) = pod(&manifest) else { continue };
        let container = &pod["spec"]["containers"][0];
        let asked = if container["args"][0] == "gateway" { &gateway } else { &server };
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            let Some(probe) = container.get(probe) else { continue };
            assert_eq!(probe["httpGet"]["port"], container["ports"][0]["name"]);
            let answer = asked.get(probe["httpGet"]["path"].as_str().expect("a path"));
            assert!(answer.contains("\"status\""), "{answer}");
        }
        if let Some(path) = pod["metadata"]["annotations"].get("prometheus.io/path") {
            assert!(asked.get(path.as_str().expect("a path")).contains("# TYPE moeworks_"));
        }
    }
}

#[test]
fn services_and_scalers_mean_what_is_there() {
    let manifests = manifests();
    let pods: Vec<&Value> = manifests.iter().filter_map(pod).collect();
    for manifest in &manifests {
        let spec = &manifest["spec"];
        if manifest["kind"] == "Service" {
            let meant = pods.iter().find(|pod| pod["metadata"]["labels"] == spec["selector"]).expect("a pod");
            assert_eq!(spec["ports"][0]["targetPort"], meant["spec"]["containers"][0]["ports"][0]["name"]);
        }
        if let Some(scaled) = spec.get("scaleTargetRef") {
            assert!(
                manifests.iter().any(|one| one["kind"] == scaled["kind"] && one["metadata"]["name"] == scaled["name"])
            );
        }
    }
    // The gateway names each pod of the set by its host name.
    let set = manifests.iter().find(|one| one["kind"] == "StatefulSet").expect("a set");
    let gateway = pods.iter().find(|pod| pod["spec"]["containers"][0]["name"] == "gateway").expect("a gateway");
    let args = words(&gateway["spec"]["containers"][0]["args"]);
    let name = |i| format!("http://moeworks-replica-{i}.{}:8000", set["spec"]["serviceName"].as_str().expect("a name"));
    let named: Vec<String> = (0..set["spec"]["replicas"].as_u64().expect("a number")).map(name).collect();
    let to = args.iter().position(|arg| *arg == "--to").expect("--to") + 1;
    assert_eq!(args[to..], named);
}

#[test]
fn manifests_fit_the_schemas_of_kubernetes() {
    let Some(python) = python_with("kubernetes_validate", "the schemas of Kubernetes") else { return };
    let folder = file("kubernetes");
    let files = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path());
    let output = Command::new(python.with_file_name("kubernetes-validate")).arg("--strict").args(files).output();
    let output = output.expect("kubernetes-validate starts");
    let said = stdout(&output) + &stderr(&output);
    assert!(output.status.success(), "{said}");
    assert_eq!(said.matches(" passed for resource ").count(), manifests().len(), "{said}");
}

#[test]
fn the_unit_is_one_of_systemd_and_fits_the_options() {
    let work = Workplace::new();
    let unit = fs::read_to_string(file("moeworks.service")).expect("a unit");
    let line = |key: &str| unit.lines().find_map(|line| line.strip_prefix(&format!("{key}="))).expect("a line");
    let start = line("ExecStart").replace("$MODEL", "/model").replace("%d/keys", "keys");
    work.file("keys", "secret\n");
    let start = start.replace("$OPTIONS", "--host 0.0.0.0");
    assert_taken(&work, &start.split(' ').skip(1).collect::<Vec<_>>());
    let shutdown: u64 = after(&start.split(' ').collect::<Vec<_>>(), "--shutdown-timeout").parse().expect("a number");
    assert!(line("TimeoutStopSec").parse::<u64>().expect("a number") >= shutdown + 5);
    let program = work.command(&[]).get_program().display().to_string();
    let path = work.file("moeworks.service", unit.replace("/usr/local/bin/moeworks", &program));
    match Command::new("systemd-analyze").args(["verify", &path]).output() {
        Ok(output) => assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output)),
        Err(_) => drop(writeln!(std::io::stderr(), "SKIPPED: systemd-analyze verify: it is not installed")),
    }
}

/// The words of the last line of the Containerfile with this instruction.
fn instruction(name: &str) -> Vec<String> {
    let text = fs::read_to_string(file("Containerfile")).expect("a file");
    let line = text.lines().rev().find_map(|line| line.strip_prefix(&format!("{name} ["))).expect("a line");
    serde_json::from_str(&format!("[{line}")).expect("a list of texts")
}

#[test]
fn the_image_has_all_that_the_program_needs() {
    let work = with_model();
    let made = Command::new(file("image")).arg(env!("CARGO_BIN_EXE_moeworks")).arg(work.path("image")).output();
    let made = made.expect("a shell");
    assert!(made.status.success(), "{}", stderr(&made));
    // The template's process is the program too, and finds itself by /proc.
    let script = "mount -t proc proc image/proc && mount --bind run image/model && shift && \
                  exec chroot --userspec=65532:65532 image \"$@\"";
    let allowed = Command::new("unshare").args(["-m", "true"]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        let _ = writeln!(std::io::stderr(), "SKIPPED: the image: only root may mount");
        return;
    }
    let mut words = instruction("ENTRYPOINT");
    words.extend(instruction("CMD"));
    let port = words.iter().position(|word| word == "--port").expect("--port") + 1;
    words[port] = "0".to_owned();
    let program = words.remove(0);
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh", "image", &program]).args(words).current_dir(work.path("."));
    let mut server = Server::of(command);
    server.address = server.address.replace("0.0.0.0", "127.0.0.1");
    let answer = server.post("/v1/completions", &json!({"prompt": "Line", "max_tokens": 5, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    server.signal("TERM");
    assert_eq!(server.child.wait().expect("ended").code(), Some(0));
}
