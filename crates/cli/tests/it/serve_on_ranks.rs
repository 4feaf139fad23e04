//! `moeworks serve` in all ways to deploy it: one process, experts over threads and processes, and replicas behind a
//! gateway. All give the same answers, and a rank that is lost ends requests with errors.
#![cfg(target_os = "linux")]

use std::io::Read as _;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::program::Workplace;
use crate::rank_failures::{process_of, signal, signal_all, wait_for};
use crate::ranks::{launchers, process_command};
use crate::serve::{Server, read, with_model};

/// The time in which requests end with errors once a rank is lost.
const PROMPTLY: Duration = Duration::from_secs(30);
/// The time limit for what a busy machine may delay.
const PATIENCE: Duration = Duration::from_secs(120);

/// Starts `serve` on the processes of a launcher.
fn on_processes(work: &Workplace, mpirun: &Path, num_ranks: usize, args: &[&str]) -> Server {
    let serve = ["serve", "run", "--port", "0", "--threads", "1"];
    Server::of(process_command(mpirun, num_ranks, &work.command(&[&serve[..], args].concat())))
}

/// Ends a server under a launcher by a signal to each of its ranks, and waits for the launcher.
fn end_processes(work: &Workplace, mut server: Server, num_ranks: usize) -> Option<i32> {
    let pids: Vec<u32> = (0..num_ranks).map(|rank| process_of(&work.path(""), rank).expect("a process")).collect();
    signal_all("-TERM", &pids);
    server.child.wait().expect("ended").code()
}

/// Sends 50 greedy requests at once and returns their texts.
fn answers(server: &Server) -> Vec<String> {
    greedy_texts(server, (0..50).map(|i| format!("Line {i} of")))
}

/// Sends a greedy request for ten tokens for each prompt, all at once, and returns the texts.
pub(crate) fn greedy_texts(server: &Server, prompts: impl Iterator<Item = String>) -> Vec<String> {
    let body = |prompt: String| json!({"prompt": prompt, "max_tokens": 10, "temperature": 0});
    let streams: Vec<TcpStream> = prompts.map(|prompt| server.send("/v1/completions", &body(prompt))).collect();
    let text = |stream: TcpStream| {
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let answer: Value = serde_json::from_str(&read(stream)).expect("JSON");
        answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    streams.into_iter().map(text).collect()
}

#[test]
fn fifty_greedy_answers_are_the_same_in_every_way_to_deploy() {
    let work = with_model();
    let fixed = "--batch-invariant";
    let one = Server::start(&work, &[fixed]);
    let expected = answers(&one);
    assert!(expected.iter().any(|text| *text != expected[0]), "answers differ from prompt to prompt");
    for ep in ["2", "4"] {
        let mut server = Server::start(&work, &[fixed, "--ep", ep]);
        assert_eq!(answers(&server), expected, "--ep {ep}");
        server.signal("TERM");
        assert_eq!(server.child.wait().expect("ended").code(), Some(0));
    }
    let other = Server::start(&work, &[fixed]);
    let urls = [&one, &other].map(|server| format!("http://{}", server.address));
    let gateway = Server::of(work.command(&["gateway", "--port", "0", "--to", &urls[0], &urls[1]]));
    assert_eq!(answers(&gateway), expected, "two replicas");
    for (mpirun, _) in launchers() {
        let server = on_processes(&work, &mpirun, 2, &[fixed]);
        assert_eq!(answers(&server), expected, "{}", mpirun.display());
        assert_eq!(end_processes(&work, server, 2), Some(0));
    }
}

#[test]
fn answers_stay_while_experts_move_and_the_load_of_ranks_is_shown_before_and_after() {
    let work = with_model();
    let fixed = "--batch-invariant";
    let expected = answers(&Server::start(&work, &[fixed]));
    // Every expert of the test's model, which has four, goes to the other rank.
    std::fs::write(work.path("moved.txt"), "placement experts=4 ranks=2\n0: 1\n1: 1\n2: 0\n3: 0\n").expect("written");
    // The first rank begins with all experts but one, or with all.
    std::fs::write(work.path("2.txt"), "placement experts=4 ranks=2\n0: 0\n1: 0\n2: 0\n3: 1\n").expect("written");
    std::fs::write(work.path("4.txt"), "placement experts=4 ranks=4\n0: 0\n1: 0\n2: 0\n3: 0\n").expect("written");
    let online =
        ["--rebalance", "online", "--rebalance-every", "24", "--spare-slots", "1", "--rebalance-megabytes", "0"];
    let [of_two, of_four] = ["2.txt", "4.txt"].map(|first| [&online[..], &["--placement", first]].concat());
    let file = ["--rebalance", "moved.txt", "--rebalance-megabytes", "0"];
    for (ep, args) in [("2", &file[..]), ("2", &of_two), ("4", &of_four)] {
        let server = Server::start(&work, &[&[fixed, "--ep", ep], args].concat());
        assert_eq!(answers(&server), expected, "--ep {ep} {args:?}");
        let load: Value = serde_json::from_str(&server.get("/moe/load")).expect("JSON");
        let ranks = &load["ranks"];
        assert_eq!(ranks["num_ranks"].to_string(), ep);
        let moved = ranks["experts_moved"].as_u64().expect("a number");
        if args == file {
            assert_eq!(moved, 2 * 4, "every expert of both layers has moved");
            assert_eq!(load["layers"][0]["ranks"], json!([[1], [1], [0], [0]]));
            assert_eq!(load["layers"][1]["ranks_before"], json!([[0], [0], [1], [1]]));
        } else {
            let balance = |name: &str| ranks[name].as_f64().expect("a number");
            assert!(moved > 0 && balance("balancedness") > balance("balancedness_before"), "{ranks}");
        }
        let metrics = server.get("/metrics");
        for name in ["rank_balancedness{model_name=\"run\",placement=\"first\"}", "experts_moved{", "expert_replicas{"]
        {
            assert!(metrics.contains(name), "{name} in {metrics}");
        }
    }
}

#[test]
fn load_and_figures_on_ranks_are_those_of_one() {
    let work = with_model();
    let [one, ranks] =
        [&[][..], &["--ep", "2"]].map(|args| Server::start(&work, &[&["--batch-invariant"], args].concat()));
    let figures = |server: &Server| {
        answers(server);
        let text = server.get("/metrics");
        let is_count = |line: &&str| line.contains("tokens_total") || line.contains("request_success");
        text.lines().filter(is_count).map(str::to_owned).collect::<Vec<_>>()
    };
    let (of_one, of_ranks) = (figures(&one), figures(&ranks));
    assert!(of_one.iter().any(|line| line.contains("expert_tokens_total")), "{of_one:?}");
    assert_eq!(of_ranks, of_one);
}

#[test]
fn clients_that_go_away_leave_nothing_on_ranks() {
    let work = with_model();
    let server = Server::start(&work, &["--ep", "2", "--max-running", "8"]);
    for i in 0_u64..30 {
        let body = json!({"prompt": "Line ".repeat(1 + i as usize % 7), "max_tokens": 150, "stream": i % 2 == 0, "ignore_eos": true});
        let client = server.send("/v1/completions", &body);
        std::thread::sleep(Duration::from_millis(i * 7 % 23));
        drop(client);
    }
    server.wait_until_idle();
    assert_eq!(server.figure("kv_cache_usage_perc"), 0.0);
    assert_eq!(
        server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2}))["usage"]["completion_tokens"],
        2
    );
}

/// The part of a core that a process uses in three seconds, by its own account of time.
fn share_of_a_core(pids: &[u32]) -> Vec<f64> {
    const PAUSE: Duration = Duration::from_secs(3);
    /// Ticks of a second, in which Linux tells times of processes.
    const TICKS: f64 = 100.0;
    let ticks = |pid: &u32| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
        let behind_name = stat.rsplit(')').next().expect("fields").split_whitespace();
        behind_name.skip(11).take(2).map(|field| field.parse::<u64>().expect("ticks")).sum()
    };
    let before: Vec<u64> = pids.iter().map(ticks).collect();
    std::thread::sleep(PAUSE);
    pids.iter()
        .map(ticks)
        .zip(before)
        .map(|(after, before)| (after - before) as f64 / TICKS / PAUSE.as_secs_f64())
        .collect()
}

/// Returns the shares of a core that processes take, or nothing if none takes a fifth.
fn busy_shares_of_a_core(pids: &[u32]) -> Option<Vec<f64>> {
    Some(share_of_a_core(pids)).filter(|shares| shares.iter().any(|&share| share >= 0.2))
}

#[test]
fn ranks_without_requests_leave_the_cores_to_others() {
    let work = with_model();
    let assert_rests = |server: &Server, pids: &[u32], how: &str| {
        answers(server);
        server.wait_until_idle();
        // On a busy machine what the last answers left to do may take longer.
        let shares: Vec<Vec<f64>> = (0..3).map_while(|_| busy_shares_of_a_core(pids)).collect();
        assert!(shares.len() < 3, "{how}: {shares:?} of a core");
    };
    let threads = Server::start(&work, &["--ep", "2"]);
    assert_rests(&threads, &[threads.child.id()], "--ep 2");
    for (mpirun, _) in launchers() {
        let server = on_processes(&work, &mpirun, 2, &[]);
        let pids = [0, 1].map(|rank| process_of(&work.path(""), rank).expect("a process"));
        assert_rests(&server, &pids, &mpirun.display().to_string());
        end_processes(&work, server, 2);
    }
}

/// Sends more long streams than a server of one answer at a time ends soon, and waits until the first has begun.
fn under_load(server: &Server) -> Vec<TcpStream> {
    let body = json!({"prompt": "Line", "max_tokens": 250, "stream": true, "ignore_eos": true});
    let mut streams: Vec<TcpStream> = (0..60).map(|_| server.send("/v1/completions", &body)).collect();
    streams[0].read_exact(&mut [0; 64]).expect("a head");
    streams
}

#[test]
fn a_rank_that_is_killed_or_frozen_ends_its_requests_with_errors_and_the_server() {
    for ((mpirun, is_open_mpi), name) in
        launchers().into_iter().flat_map(|launcher| ["-KILL", "-STOP"].map(|name| (launcher.clone(), name)))
    {
        let work = with_model();
        let mut server = on_processes(&work, &mpirun, 2, &["--max-running", "1"]);
        let streams = under_load(&server);
        let pid = process_of(&work.path(""), 1).expect("a process");
        signal(name, pid);
        let start = Instant::now();
        let (mut num_told, mut num_answered) = (0, 0);
        for mut stream in streams {
            let mut rest = String::new();
            // A connection may also be cut where the launcher is quicker.
            let _ = stream.read_to_string(&mut rest);
            assert!(start.elapsed() < PROMPTLY, "{name}: requests hang");
            num_told += usize::from(rest.contains("\"error\"") || rest.contains("503 Service Unavailable"));
            // Where processes wait for a core, some answers end before the signal comes.
            num_answered += usize::from(rest.contains("data: [DONE]") && !rest.contains("\"error\""));
        }
        // MPICH's launcher kills the other processes as soon as one is killed: clients see cut connections.
        let is_cut = name == "-KILL" && !is_open_mpi;
        let counts = format!("{name} {}: {num_told} of 60 were told, {num_answered} answered", mpirun.display());
        assert!(is_cut || num_told > 0 && num_told + num_answered > 50, "{counts}");
        wait_for(PATIENCE, "end of rank 0", || process_of(&work.path(""), 0).is_none().then_some(()));
        assert!(!server.child.wait().expect("ended").success(), "{name}");
        if process_of(&work.path(""), 1).is_some() {
            signal("-KILL", pid);
        }
    }
}

#[test]
fn sigterm_on_all_ranks_ends_what_is_under_way_first() {
    for (mpirun, _) in launchers() {
        let work = with_model();
        let server = on_processes(&work, &mpirun, 2, &["--shutdown-timeout", "300"]);
        let body = json!({"prompt": "Line", "max_tokens": 60, "stream": true, "ignore_eos": true});
        let mut streams: Vec<TcpStream> = (0..3).map(|_| server.send("/v1/completions", &body)).collect();
        streams.iter_mut().for_each(|stream| stream.read_exact(&mut [0; 64]).expect("a head"));
        let code = end_processes(&work, server, 2);
        for mut stream in streams {
            let mut rest = String::new();
            stream.read_to_string(&mut rest).expect("the rest");
            assert!(rest.contains("data: [DONE]") && rest.contains("\"length\""), "{rest}");
        }
        assert_eq!(code, Some(0));
    }
}
