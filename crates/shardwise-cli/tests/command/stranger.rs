//! Closed pipes, mistyped names, full disks and other surroundings in which the command has to behave.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use crate::program::{Place, TINY, json, lines, shardwise, succeeds};

#[test]
fn a_closed_pipe_is_not_an_error() {
    for arguments in [&["ops"][..], &["ops", "--json"], &["ops", "matmul"], &["--help"], &["train", "--help"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardwise"))
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // As `head -0` does.
        drop(child.stdout.take());
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success(), "{arguments:?}: {said}");
        assert_eq!(said, "", "{arguments:?}");
    }
}

#[test]
fn training_continues_after_standard_error_is_closed() {
    let place = Place::new("unread");
    let out = place.at("out");
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardwise"))
        .args([&["train", "--json", "--out", &out, "--steps", "8", "--mesh", "dp=2"], &TINY[..]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    said.read_line(&mut String::new()).unwrap();
    drop(said);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(json(&String::from_utf8(output.stdout).unwrap())["steps"], 8);
}

#[test]
fn operators_that_do_not_exist_are_refused_in_any_script() {
    for (name, parts) in [
        ("\u{e9}", &["\u{e9}", "shardwise ops"][..]),
        ("", &["\"\"", "name of an operator"]),
        ("\u{1f980}mat", &["shardwise ops"]),
        ("matmull", &["matmul"]),
    ] {
        let output = shardwise(&["ops", name]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}: {message}");
        assert!(message.starts_with("error: invalid operator") && !message.contains("panicked"), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{name}: {message}");
    }
}

#[test]
fn output_in_a_pipe_is_text_unless_json_is_asked_for() {
    let text = succeeds(&["ops", "matmul"]);
    assert!(text.starts_with("inputs ") && serde_json::from_str::<serde_json::Value>(&text).is_err(), "{text}");
    let place = Place::new("text");
    let out = place.at("out");
    let options = [&["--out", &out, "--steps", "2", "--mesh", "dp=1"][..], &TINY].concat();
    let summary = succeeds(&[&["train"], &options[..]].concat());
    assert!(summary.starts_with("steps          2\n") && summary.contains("held-out loss"), "{summary}");
    let checkpoint = format!("{out}/checkpoints/step-00000002");
    for arguments in [["ckpt", "inspect", &checkpoint], ["ckpt", "verify", &checkpoint]] {
        let text = succeeds(&arguments);
        assert!(serde_json::from_str::<serde_json::Value>(&text).is_err(), "{text}");
        assert!(serde_json::from_str::<serde_json::Value>(&succeeds(&[&arguments[..], &["--json"]].concat())).is_ok());
    }
}

/// The number of points on the curve of the training losses.
fn points(out: &str) -> usize {
    let picture = std::fs::read_to_string(format!("{out}/loss.svg")).unwrap();
    let trained = picture.split("points=\"").nth(2).unwrap().split('"').next().unwrap();
    trained.split(' ').count()
}

#[test]
fn the_curve_keeps_its_history_across_resumes() {
    let place = Place::new("history");
    let (out, other) = (place.at("out"), place.at("other"));
    let of = |out: &str| {
        let all = lines(&format!("{out}/losses.jsonl"));
        all.into_iter().filter(|line| line["loss"].is_f64()).collect::<Vec<_>>()
    };
    let options = [&["train", "--json", "--mesh", "dp=2", "--save-every", "3", "--keep", "9"][..], &TINY].concat();
    succeeds(&[&options[..], &["--out", &out, "--steps", "5"]].concat());
    let before = of(&out);
    assert_eq!((points(&out), before.len()), (5, 5));
    succeeds(&["train", "--json", "--resume", "--out", &out, "--steps", "9"]);
    assert_eq!(points(&out), 9);
    assert_eq!(of(&out)[..5], before);
    assert!(of(&out).iter().map(|line| line["step"].as_u64().unwrap()).eq(1..=9));
    // from the middle into another directory: what came before the checkpoint comes along, what came after does not
    let middle = format!("{out}/checkpoints/step-00000003");
    succeeds(&["train", "--json", "--resume", &middle, "--out", &other, "--steps", "7"]);
    assert_eq!(points(&other), 7);
    assert_eq!(of(&other)[..3], of(&out)[..3]);
}

#[test]
fn resuming_a_finished_run_reports_that_nothing_is_left_to_train() {
    let place = Place::new("over");
    let out = place.at("out");
    succeeds(&[&["train", "--out", &out, "--steps", "2", "--mesh", "dp=2"], &TINY[..]].concat());
    let output = shardwise(&["train", "--resume", "--out", &out]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("nothing left to train"), "{said}");
    assert!(said.contains("step 2 of 2") && said.contains("--steps"), "{said}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("nothing left to train"));
    assert_eq!(points(&out), 2);
}

#[test]
#[cfg(target_os = "linux")]
fn a_path_that_cannot_be_written_is_reported_with_its_cause() {
    let place = Place::new("full");
    let out = place.at("out");
    let options = [&["--mesh", "dp=2", "--steps", "2"][..], &TINY].concat();
    let fails = |more: &[&str], parts: &[&str]| {
        let output = shardwise(&[&["train"], &options[..], more].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        let error = message.lines().find(|line| line.starts_with("error: ")).unwrap_or_default().to_string();
        assert!(!output.status.success() && parts.iter().all(|part| error.contains(part)), "{parts:?}: {message}");
    };
    // /dev/full is a disk without room
    fails(&["--out", &out, "--log", "/dev/full"], &["/dev/full", "No space left"]);
    fails(&["--out", "/proc/nothing"], &["/proc/nothing"]);
    let file = place.file("file", "");
    fails(&["--out", &format!("{file}/out")], &["file/out", "Not a directory"]);
    // outputs that are in the way of what is written
    for name in ["loss.svg", "losses.jsonl", "config.json"] {
        let blocked = place.at(&format!("blocked-{name}"));
        std::fs::create_dir_all(format!("{blocked}/{name}")).unwrap();
        fails(&["--out", &blocked], &[&format!("{blocked}/{name}"), "something that is not a file is in its place"]);
    }
    let blocked = place.at("blocked-checkpoints");
    std::fs::create_dir_all(&blocked).unwrap();
    std::fs::write(format!("{blocked}/checkpoints"), "").unwrap();
    fails(&["--out", &blocked], &["blocked-checkpoints/checkpoints"]);
}

#[test]
fn two_runs_do_not_share_an_output_directory() {
    let place = Place::new("locked");
    let out = place.at("out");
    let options = [&["train", "--out", &out, "--steps", "100000", "--mesh", "dp=1", "--overwrite"][..], &TINY].concat();
    let start = || {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardwise"))
            .args(&options)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The first line is printed when the run has begun.
        let mut said = BufReader::new(child.stderr.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        (child, said)
    };
    let (mut first, _said) = start();
    let losses = std::fs::metadata(format!("{out}/losses.jsonl")).unwrap().modified().unwrap();
    let refused = shardwise(&options);
    let message = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{message}");
    for part in [&out[..], "another run", &format!("process {}", first.id()), "choose another --out"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // The run that goes on has not noticed, and a killed one leaves nothing behind that refuses the next.
    assert!(first.try_wait().unwrap().is_none());
    assert!(std::fs::metadata(format!("{out}/losses.jsonl")).unwrap().modified().unwrap() >= losses);
    first.kill().unwrap();
    first.wait().unwrap();
    let (mut next, _said) = start();
    assert!(next.try_wait().unwrap().is_none(), "it has started");
    next.kill().unwrap();
    next.wait().unwrap();
}

#[test]
fn more_thread_ranks_than_a_machine_can_run_are_refused_at_once() {
    let place = Place::new("many-ranks");
    let out = place.at("out");
    let train = [&["train", "--steps", "1", "--batch-size", "2000", "--out", &out], &TINY[..8]].concat();
    let refused = |arguments: &[&str]| {
        let output = shardwise(arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        for part in ["1000 ranks as threads", "core(s)", "thread ranks on this machine", "shardwise plan"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    };
    refused(&[&train[..], &["--mesh", "dp=1000"]].concat());
    assert!(!std::path::Path::new(&out).exists());
    // More ranks than heads, than layers and than cores are a mesh that someone may want to try.
    succeeds(&[&train[..], &["--mesh", "tp=64", "--batch-size", "1", "--sample-tokens", "1"]].concat());
    refused(&["generate", &out, "--mesh", "tp=1000", "--prompt", "a"]);
    let bert = concat!(env!("CARGO_MANIFEST_DIR"), "/../shardwise/tests/conformance/data/models/bert");
    refused(&["embed", bert, &place.file("sentences.txt", "a sentence"), "--mesh", "dp=1000"]);
    succeeds(&["generate", &out, "--mesh", "tp=5", "--prompt", "a", "--max-tokens", "2"]);
}

#[test]
fn what_is_typed_by_habit_is_understood() {
    // PyTorch's names of placements and its form of shapes, and bits per second.
    for shape in ["[4, 2]", "(4, 2)", "4,2"] {
        assert_eq!(
            succeeds(&["show", shape, "S(0)", "--mesh", "dp=2"]),
            succeeds(&["show", "4x2", "S(0)", "--mesh", "dp=2"])
        );
    }
    assert_eq!(
        succeeds(&["show", "4x2", "Shard(0)", "--mesh", "dp=2"]),
        succeeds(&["show", "4x2", "S(0)", "--mesh", "dp=2"])
    );
    let assumed = succeeds(&["plan", "gpt", "--mesh", "dp=2", "--link", "dp=100Gb/s,5us"]);
    assert!(assumed.contains("assumes 12.5 GB/s and 5 us along dp"), "{assumed}");
    let negative = shardwise(&["train", "--lr", "-1"]);
    assert!(String::from_utf8_lossy(&negative.stderr).contains("invalid lr: found -1"), "{negative:?}");
    // The directory of a run is its latest checkpoint.
    let place = Place::new("run-as-checkpoint");
    let run = place.at("run");
    succeeds(&[&["train", "--steps", "2", "--mesh", "dp=2", "--out", &run][..], &TINY[..]].concat());
    assert!(succeeds(&["ckpt", "verify", &run]).starts_with("intact"));
    assert!(!std::path::Path::new(&run).join("dump").exists());
}
