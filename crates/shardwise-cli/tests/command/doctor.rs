//! `shardwise doctor`, `completions` and `man`, and what the command says about names that do not exist.

use std::process::{Command, Output};

use crate::program::{Place, json, shardwise, succeeds};

fn doctor(options: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_shardwise"));
    program.arg("doctor").args(options).envs(variables.iter().copied());
    program.output().expect("the command starts")
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn doctor_finds_nothing_wrong_with_a_machine_that_works() {
    let output = doctor(&[], &[]);
    let report = text(&output);
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
    for name in
        ["build", "cores", "memory", "instructions", "devices", "mpi", "files", "self-test", "matmul", "all_reduce"]
    {
        assert!(report.contains(name), "{name} in {report}");
    }
    let long = report.lines().find(|line| line.chars().count() > 80);
    assert!(long.is_none() && report.ends_with("nothing is wrong\n"), "{report}");
    let found = json(&text(&doctor(&["--json", "--no-test"], &[])));
    let checks = found["checks"].as_array().unwrap();
    assert!(found["ok"] == true && checks.iter().all(|check| check["verdict"] != "wrong"), "{found}");
}

#[test]
fn doctor_says_what_is_wrong_and_exits_with_1() {
    let said = |variables: &[(&str, &str)], code: i32, parts: &[&str]| {
        let output = doctor(&["--no-test"], variables);
        let report = text(&output);
        assert_eq!(output.status.code(), Some(code), "{report}");
        // Words may be on the next line.
        let words = report.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(parts.iter().all(|part| words.contains(part)), "{parts:?} in {report}");
    };
    said(&[("SHARDWISE_DEADLINE", "soon")], 1, &["wrong: SHARDWISE_DEADLINE=soon", "something is wrong"]);
    said(&[("SHARDWISE_SIMD", "avx1024")], 1, &["wrong: SHARDWISE_SIMD=avx1024; use one of baseline"]);
    said(&[("SHARDWISE_DEADLIN", "5")], 0, &["note: SHARDWISE_DEADLIN=5, which nothing reads", "`SHARDWISE_DEADLINE`"]);
    said(&[("SHARDWISE_SIMD", "baseline")], 0, &["baseline in use"]);
    // An instruction set that does not exist would end the self-test.
    assert_eq!(doctor(&[], &[("SHARDWISE_SIMD", "avx1024")]).status.code(), Some(1));
}

#[test]
fn shells_and_man_know_every_command() {
    let place = Place::new("manuals");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeeds(&["completions", shell]);
        for word in ["redistribute", "merge-lora", "sequence-parallel"] {
            assert!(script.contains(word), "{word} for {shell}");
        }
    }
    let directory = place.at("man/man1");
    succeeds(&["man", &directory]);
    for (page, words) in
        [("shardwise.1", "doctor"), ("shardwise-train.1", "warmup"), ("shardwise-bench-data.1", "floor")]
    {
        let page =
            std::fs::read_to_string(format!("{directory}/{page}")).unwrap_or_else(|error| panic!("{page}: {error}"));
        assert!(page.starts_with(".ie") && page.contains(words), "{page:.200}");
    }
    let file = place.file("file", "");
    let output = shardwise(&["man", &file]);
    assert!(output.status.code() == Some(1) && String::from_utf8_lossy(&output.stderr).contains(&file));
}

/// The exit code and the error of a command.
fn error(arguments: &[&str]) -> (Option<i32>, String) {
    let output = shardwise(arguments);
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn the_nearest_names_are_suggested() {
    let place = Place::new("nearest");
    let out = place.at("out");
    for (arguments, nearest) in [
        (&["trian"][..], "'train'"),
        (&["bench", "collectve"], "'collectives'"),
        (&["train", "--plan", "fspd"], "'fsdp'"),
        (&["train", "--stesp", "3"], "'--steps'"),
        (&["train", "--schedule", "cosin"], "'cosine'"),
        (&["train", "--optimizer", "moun"], "'muon'"),
    ] {
        let (code, message) = error(arguments);
        // A command line that does not parse.
        assert!(code == Some(2) && message.contains(nearest), "{arguments:?}: {message}");
    }
    for (arguments, nearest) in [
        (&["train", "--out", &out, "--mesh", "ddp=2"][..], "`dp`"),
        (&["bench", "kernels", "--only", "matmul 1023"], "`matmul 1024`"),
        (&["ops", "matmull"], "matmul"),
    ] {
        let (code, message) = error(arguments);
        assert!(code == Some(1) && message.contains(nearest), "{arguments:?}: {message}");
    }
    assert!(!std::path::Path::new(&out).exists());
}

#[test]
fn no_color_means_no_color() {
    let colored = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_shardwise"));
        let output = program.args(arguments).envs(variables.iter().copied()).output().unwrap();
        [output.stdout, output.stderr].concat().contains(&b'\x1b')
    };
    let show = ["show", "8x64", "S(0),R", "--mesh", "dp=2,tp=2"];
    assert!(!colored(&show, &[("NO_COLOR", "1"), ("CLICOLOR_FORCE", "0")]));
    assert!(colored(&["--help"], &[("CLICOLOR_FORCE", "1")]));
    assert!(!colored(&["--help"], &[("NO_COLOR", "1")]));
    assert!(!colored(&["trian"], &[("NO_COLOR", "1")]));
}
