//! `shardwise report` and what `train` writes for it.

use crate::program::{Place, TINY, json, lines, shardwise, succeeds};

fn train(place: &Place, more: &[&str]) -> String {
    let out = place.at("run");
    succeeds(&[&["train", "--steps", "4", "--mesh", "dp=2,tp=2", "--out", &out], &TINY[..], more].concat());
    out
}

#[test]
fn a_profiled_step_becomes_a_page_a_trace_and_a_comparison() {
    let place = Place::new("report");
    let page = place.at("run.html");
    let out = train(&place, &["--report", &page]);
    let missing = place.at("missing/run.html");
    let refused = shardwise(&[&["train", "--report", &missing], &TINY[..]].concat());
    let refused = String::from_utf8_lossy(&refused.stderr).to_string();
    assert!(refused.contains("invalid --report") && !refused.contains("step"), "{refused}");
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.starts_with("<!doctype html>") && text.contains("on dp=2,tp=2, tp, step 3"), "{}", &text[..300]);
    let (again, trace) = (place.at("again.html"), place.at("trace.json"));
    succeeds(&["report", &out, "--out", &again, "--perfetto", &trace, "--compare", &page]);
    let events = json(&std::fs::read_to_string(&trace).unwrap())["traceEvents"].as_array().unwrap().len();
    assert!(events > 100, "{events} events");
    let both = std::fs::read_to_string(&again).unwrap();
    assert_eq!(both.matches("\"title\":").count(), 2);
    // Runs of the same name are told apart by their paths, runs with different plans by the plans.
    for path in [&out, &page] {
        assert!(both.contains(&format!("\"title\":\"gpt on dp=2,tp=2, tp, step 3 ({path})\"")), "{path}");
    }
    let sharded = place.at("sharded");
    let options = ["train", "--steps", "4", "--mesh", "dp=2,tp=2", "--plan", "fsdp+tp", "--report", &again];
    succeeds(&[&options[..], &["--out", &sharded], &TINY[..]].concat());
    succeeds(&["report", &out, "--out", &again, "--compare", &sharded]);
    let both = std::fs::read_to_string(&again).unwrap();
    for title in ["gpt on dp=2,tp=2, tp, step 3", "gpt on dp=2,tp=2, fsdp+tp, step 3"] {
        assert_eq!(both.matches(&format!("\"title\":\"{title}\"")).count(), 1, "{title}");
    }
    // A page is a report, too.
    succeeds(&["report", &page, "--out", &again]);
    assert_eq!(std::fs::read_to_string(&again).unwrap(), text);
}

#[test]
fn metrics_of_all_ranks_are_in_the_log_and_in_events() {
    let place = Place::new("metrics");
    let (log, events) = (place.at("log.jsonl"), place.at("events"));
    let out = train(&place, &["--log", &log, "--tensorboard", &events, "--log-curve"]);
    let steps: Vec<_> = lines(&log).into_iter().filter(|line| line.get("loss").is_some()).collect();
    assert_eq!(steps.len(), 4);
    for step in steps {
        let ranks = step["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), 4);
        for rank in ranks {
            assert!(rank["ms"].as_f64().unwrap() > 0.0 && rank["memory_bytes"].as_u64().unwrap() > 0, "{rank}");
            assert!((0.0..=1.0).contains(&rank["waiting"].as_f64().unwrap()), "{rank}");
        }
    }
    let curve = std::fs::read_to_string(format!("{out}/loss.svg")).unwrap();
    assert_eq!(curve.matches("class=\"rank\"").count(), 4);
    let files: Vec<_> = std::fs::read_dir(&events).unwrap().map(|entry| entry.unwrap().path()).collect();
    let bytes = std::fs::read(&files[0]).unwrap();
    let has = |text: &str| bytes.windows(text.len()).filter(|window| *window == text.as_bytes()).count();
    assert_eq!((files.len(), has("loss/train"), has("step_ms/rank_3"), has("loss/held_out")), (1, 4, 4, 1));
}

#[test]
fn a_failed_run_leaves_dumps_that_a_page_shows() {
    let place = Place::new("failed");
    let out = place.at("run");
    // A learning rate that makes the loss overflow: training ends with an error on all ranks.
    let arguments = [
        "train",
        "--steps",
        "40",
        "--mesh",
        "dp=2",
        "--out",
        &out,
        "--lr",
        "1e30",
        "--warmup",
        "0",
        "--clip-grad-norm",
        "0",
    ];
    let output = shardwise(&[&arguments[..], &TINY[..]].concat());
    let error = String::from_utf8_lossy(&output.stderr).to_string();
    assert!(!output.status.success() && error.contains("`shardwise report "), "{error}");
    let page = place.at("failed.html");
    succeeds(&["report", &format!("{out}/dump"), "--out", &page]);
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(
        text.contains("\"failures\":[{\"rank\":0") && text.contains("a finite number"),
        "{}",
        &text[text.len() - 2000..]
    );
    // The directory of a run whose report was written before it failed shows both, that of a later report only the report.
    let run = place.at("both");
    succeeds(&[&["train", "--steps", "2", "--mesh", "dp=2", "--out", &run, "--report", &page], &TINY[..]].concat());
    std::fs::create_dir(format!("{run}/dump")).unwrap();
    std::fs::copy(format!("{out}/dump/rank-0.json"), format!("{run}/dump/rank-0.json")).unwrap();
    let both = || {
        succeeds(&["report", &run, "--out", &page]);
        let text = std::fs::read_to_string(&page).unwrap();
        (text.contains("\"failures\":[{\"rank\":0"), text.contains("\"runs\":[{"))
    };
    assert_eq!(both(), (true, true));
    let report = format!("{run}/report.json");
    std::fs::write(&report, std::fs::read(&report).unwrap()).unwrap();
    assert_eq!(both(), (false, true));
}

#[test]
fn a_deadline_before_the_first_step_leaves_dumps_and_a_wrong_option_none() {
    let place = Place::new("late");
    let out = place.at("run");
    // No rank comes within a nanosecond of another. On a busy machine it takes some steps until one notices, because ranks that
    // wait let other ranks run a few times before they look at the clock.
    // Dumps are written into a directory that exists, also if the first call of all is the one that is late.
    std::fs::create_dir_all(&out).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_shardwise"));
    command.args(["train", "--mesh", "dp=4", "--steps", "3000", "--out", &out]).args(TINY);
    command.env("SHARDWISE_DEADLINE", "0.000000001");
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).to_string();
    assert!(!output.status.success() && error.contains("`shardwise report "), "{error}");
    let page = place.at("late.html");
    succeeds(&["report", &out, "--out", &page]);
    assert!(std::fs::read_to_string(&page).unwrap().contains("which did not join"));
    let other = place.at("other");
    let log = place.at("no/such/log");
    let refused = shardwise(&[&["train", "--mesh", "dp=2", "--out", &other, "--log", &log], &TINY[..]].concat());
    assert!(!refused.status.success() && !std::path::Path::new(&other).join("dump").exists());
}

#[test]
fn what_is_no_report_is_refused() {
    let place = Place::new("no-report");
    let (text, page) = (place.file("notes.txt", "hello"), place.file("page.html", "<html></html>"));
    for (path, found) in
        [(text.as_str(), "notes.txt"), (&page, "page without data"), (&place.at("none"), "none: No such file")]
    {
        let output = shardwise(&["report", path, "--out", &place.at("out.html")]);
        let error = String::from_utf8_lossy(&output.stderr).to_string();
        assert!(!output.status.success() && error.contains(found), "{error}");
    }
    let output = shardwise(&["report", &place.at("")]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("without rank-*.json"));
}
