//! `shardwise show`, `plan` and `comms`, as a user runs them.

use crate::program::{Place, json, shardwise, succeeds};

const GPT: [&str; 12] =
    ["gpt", "--layers", "2", "--d-model", "32", "--heads", "4", "--length", "16", "--dtype", "f32", "--mesh"];

#[test]
fn layouts_are_drawn_without_colours_in_a_pipe_and_with_boxes_in_json() {
    let text = succeeds(&["show", "8x64", "S(0),S(1)", "--mesh", "dp=2,tp=2"]);
    assert!(
        text.contains("│ 0") && text.contains("every rank holds [4, 32], 512 B") && !text.contains('\u{1b}'),
        "{text}"
    );
    assert!(succeeds(&["show", "8", "S(0)", "--mesh", "dp=2", "--color", "always"]).contains('\u{1b}'));
    assert!(succeeds(&["show", "--mesh", "dp=2,tp=4"]).contains("axis tp: 4 ranks"));
    let row = json(&succeeds(&["show", "8x64", "P(sum),R", "--mesh", "dp=2,tp=2", "--to", "S(0),S(1)", "--json"]));
    assert_eq!(row["ranks"].as_array().unwrap().len(), 4);
    assert!(row["redistribution"]["chosen"]["steps"][0].as_str().unwrap().contains("narrow"), "{row}");
    let place = Place::new("show");
    succeeds(&["show", "8x8", "S(0)", "--mesh", "dp=2", "--svg", &place.at("layout.svg")]);
    assert!(std::fs::read_to_string(place.at("layout.svg")).unwrap().starts_with("<svg"));
}

#[test]
fn what_cannot_be_drawn_is_said() {
    let cases: [(&[&str], &str); 7] = [
        (&["show", "8xb", "R"], "`b` in `8xb`"),
        (&["show", "8", "S(0)", "--mesh", "dp=2,tp=2"], "2, one per mesh axis"),
        (&["show", "8x8", "S(0),R", "--rows", "0", "--cols", "2"], "two dimensions of a tensor that has 2"),
        (&["show", "--to", "R"], "without a shape"),
        (&["show", "8x8", "S(0),S(0)", "--order", "0=tp,pp"], "`pp`"),
        (&["show", "8x8", "S(0),S(1)", "--order", "0=tp,dp"], "axes that shard dimension 0"),
        (&["show", "8x8", "R", "--mesh", "dp"], "a name and a size"),
    ];
    for (arguments, needed) in cases {
        let output = shardwise(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(needed), "{arguments:?}: {said}");
    }
}

#[test]
fn a_step_is_planned_from_a_built_in_model_and_says_what_would_fit() {
    let plan = |more: &[&str]| succeeds(&[&["plan"], &GPT[..], more].concat());
    let text = plan(&["dp=4", "--plan", "ddp", "--batch", "2"]);
    assert!(text.contains("mesh dp=4 (4 ranks), plan ddp, f32, adamw") && text.contains("batch of 8"), "{text}");
    let report = json(&plan(&["dp=4", "--plan", "fsdp", "--json", "--link", "dp=100GB/s,5us", "--flops", "400T"]));
    assert_eq!(report["links"][0]["gb_per_s"], 100.0);
    assert!(report["calls"][0]["reason"].is_string(), "{}", report["calls"][0]);
    let small = |more: &[&str]| {
        let output = shardwise(&[&["plan"], &GPT[..], &["dp=4", "--batch", "2"], more].concat());
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, said) = small(&["--plan", "ddp", "--memory", "400k"]);
    assert!(said.contains("does not fit") && said.contains("--plan fsdp takes"), "{said}");
    assert_eq!(code, Some(1));
    // Scripts read the exit code or the field.
    for (memory, code, fits) in [("400k", 1, json("false")), ("400G", 0, json("true"))] {
        let (found, said) = small(&["--plan", "ddp", "--memory", memory, "--json"]);
        let report = json(&said);
        assert_eq!((found, &report["fits"]), (Some(code), &fits));
        let peak: u64 = report["peak"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
        assert_eq!(report["peak_bytes"], peak);
    }
    assert!(json(&small(&["--json"]).1)["fits"].is_null());
    // Of the candidates of a search one may fit where the plan does not; none fits into a kilobyte.
    let search = |memory: &str| small(&["--memory", memory, "--search"]).0;
    assert_eq!([search("400k"), search("1k")], [Some(0), Some(1)]);
    let rows = plan(&["dp=2,tp=2", "--search", "--json"]);
    let meshes: Vec<String> = rows.lines().map(|row| json(row)["mesh"].as_str().unwrap().to_string()).collect();
    assert!(meshes.contains(&"dp=4".to_string()) && meshes.contains(&"tp=4".to_string()), "{meshes:?}");
    for (wrong, needed) in [("--link=tp=1GB/s", "tp"), ("--memory=much", "`much`"), ("--batch=0", "at least 1")] {
        let output = shardwise(&[&["plan"], &GPT[..], &["dp=4", wrong]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(needed), "{wrong}: {said}");
    }
}

/// The batch grows with the ranks, what a rank holds does not: one f32 per token of the batch would be 256 MB.
#[test]
fn a_rank_of_a_million_holds_no_gradient_of_the_batch() {
    let report = json(&succeeds(&["plan", "gpt", "--mesh", "dp=1000003", "--plan", "ddp", "--json"]));
    assert!(report["peak_bytes"].as_u64().unwrap() < 20_000_000, "{}", report["peak_bytes"]);
}

/// Rows of a search: meshes, and whether they fit.
fn searched(arguments: &[&str]) -> Vec<(String, Option<bool>)> {
    let rows = succeeds(&[&["plan"], arguments, &["--search", "--json"]].concat());
    let row = |line: &str| (json(line)["mesh"].as_str().unwrap().to_string(), json(line)["fits"].as_bool());
    rows.lines().map(row).collect()
}

#[test]
fn a_search_tries_every_mesh_whatever_the_heads() {
    // Four heads and two key heads: eight ranks along tp divide neither, and take the least memory.
    let qwen3 = concat!(env!("CARGO_MANIFEST_DIR"), "/../shardwise/tests/conformance/data/models/qwen3");
    let rows = searched(&[qwen3, "--mesh", "tp=8", "--memory", "8M"]);
    let meshes: std::collections::BTreeSet<&str> = rows.iter().map(|(mesh, _)| mesh.as_str()).collect();
    assert_eq!(meshes.into_iter().collect::<Vec<_>>(), ["dp=2,tp=4", "dp=4,tp=2", "dp=8", "tp=8"]);
    assert!(rows.iter().all(|(_, fits)| *fits == Some(true)), "{rows:?}");
    // 1.3 MB are enough only for that mesh; meshes that do not fit come last.
    let rows = searched(&[qwen3, "--mesh", "tp=8", "--memory", "1300k"]);
    assert_eq!(rows[0], ("tp=8".to_string(), Some(true)), "{rows:?}");
    assert!(rows[1..].iter().all(|(_, fits)| *fits == Some(false)), "{rows:?}");
    // Nine heads and three key heads on six ranks.
    let rows = searched(&["llama", "--heads", "9", "--kv-heads", "3", "--d-model", "72", "--mesh", "dp=6"]);
    for mesh in ["dp=6", "dp=3,tp=2", "dp=2,tp=3", "tp=6"] {
        assert!(rows.iter().any(|(found, _)| found == mesh), "{mesh}: {rows:?}");
    }
}

#[test]
fn a_lockfile_is_written_compared_and_a_change_is_shown() {
    let place = Place::new("comms");
    let file = place.at("step.lock");
    let run = |verb: &str, plan: &str| {
        shardwise(&[&["comms", verb], &GPT[..], &["dp=4", "--plan", plan, "--file", &file]].concat())
    };
    assert!(!run("check", "fsdp").status.success(), "there is no file yet");
    let written = run("lock", "fsdp");
    assert!(written.status.success() && String::from_utf8_lossy(&written.stdout).contains("step.lock"));
    assert!(run("check", "fsdp").status.success());
    let changed = run("check", "ddp");
    let said = String::from_utf8_lossy(&changed.stderr).into_owned();
    assert!(
        !changed.status.success() && said.contains("  - forward blocks.*.") && said.contains("all_gather"),
        "{said}"
    );
}
