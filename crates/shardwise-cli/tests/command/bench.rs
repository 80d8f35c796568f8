//! `shardwise bench` and `shardwise ops`.

use std::process::{Command, Output};

fn shardwise(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardwise")).args(arguments).output().expect("the command starts")
}

#[test]
fn bench_collectives_prints_one_json_object_per_case() {
    let output = shardwise(&["bench", "collectives", "--ranks", "1,2", "--mb", "2", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(rows.len(), 2 * 16);
    for row in &rows {
        assert!(row["case"].is_string() && row["ms"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["world"].is_u64() && row["gbps"].is_f64() && row["memcpy_ms"].is_f64(), "{row}");
    }
    for case in ["64B all_reduce", "2MB all_gather", "1MB exchange_dims", "barrier"] {
        assert!(rows.iter().any(|row| row["case"] == case), "{case} missing in {text}");
    }
}

#[test]
fn bench_redistribute_prints_one_json_object_per_case() {
    let output = shardwise(&["bench", "redistribute", "--ranks", "2", "--mb", "1,2", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let cases: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    let expected =
        ["S0->R", "S0->S1", "P->R", "P->S0"].map(|name| ["1MB ", "2MB "].map(|size| format!("{size}{name}")));
    assert!(expected.iter().flatten().all(|case| cases.contains(&case.as_str())), "{cases:?}");
    assert!(cases.contains(&"small S0->R"));
    for row in &rows {
        assert!(row["world"] == 2 && row["ms"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["gbps"].is_f64() && row["memcpy_gbps"].is_f64(), "{row}");
    }
}

/// A floor that a kernel beats hides how slow other kernels are. Floor and kernel are both the best of samples that other programs
/// interrupt: a case that seems to beat its floor is measured again, and the best floor of all runs counts.
#[test]
fn no_kernel_is_faster_than_its_floor() {
    if cfg!(debug_assertions) {
        // Checks of every access make the loops of the floors slower than the kernels, whose accesses are checked per block.
        eprintln!(
            "floors are NOT compared with kernels in a build with debug assertions; run `cargo test --release --test command floor`"
        );
        return;
    }
    const TOLERANCE: f64 = 0.05;
    const RUNS: usize = 12;
    // Bound by registers or memory, and close to it; the other cases have the same two floors.
    let cases = "add,f32 to bf16,broadcast add row,sum all,sum rows,sum columns,max columns,cat columns,matmul 1024,bmm 16x256,\
        conv2d 3x3,attention causal 1024,adamw 8M";
    for set in instruction_sets() {
        // The best time and the best floor of each case, and the cases that are still in doubt.
        let (mut best, mut doubtful) =
            (std::collections::BTreeMap::new(), cases.split(',').map(String::from).collect::<Vec<_>>());
        for _ in 0..RUNS {
            let output = Command::new(env!("CARGO_BIN_EXE_shardwise"))
                .args(["bench", "kernels", "--json", "--seconds", "0.02", "--only", &doubtful.join(",")])
                .env("SHARDWISE_SIMD", set)
                .output()
                .expect("the command starts");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            for line in String::from_utf8(output.stdout).unwrap().lines() {
                let row: serde_json::Value = serde_json::from_str(line).expect(line);
                let (ms, floor) = best.entry(row["case"].as_str().unwrap().to_string()).or_insert((f64::MAX, f64::MAX));
                *ms = row["ms"].as_f64().unwrap().min(*ms);
                *floor = row["floor_ms"].as_f64().unwrap().min(*floor);
            }
            doubtful.retain(|case| best[case].0 < best[case].1 * (1.0 - TOLERANCE));
            if doubtful.is_empty() {
                break;
            }
        }
        let wrong: Vec<_> = doubtful.iter().map(|case| (case, best[case])).collect();
        assert!(wrong.is_empty(), "{set}: faster than the floor, as (case, (ms, floor)): {wrong:?}");
    }
}

/// The instruction sets of this processor, by the names of `SHARDWISE_SIMD`.
fn instruction_sets() -> Vec<&'static str> {
    let mut sets = vec!["baseline"];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            sets.push("avx2");
        }
        // Every processor with VL has the other extensions of the set but the first, which `SHARDWISE_SIMD` would refuse.
        if sets.len() == 2 && is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512bw") {
            sets.push("avx512");
        }
    }
    sets
}

#[test]
fn bench_decode_prints_one_json_object_per_case() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../shardwise/tests/conformance/data/models/llama_gqa");
    let sizes = ["--ranks", "1,3", "--threads", "1", "--tokens", "4", "--runs", "2"];
    let output = shardwise(&[&["bench", "decode", model, "--json"], &sizes[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(rows.iter().map(|row| row["world"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3]);
    for row in &rows {
        assert!(row["weights"] == "f32" && row["tokens_per_s"].as_f64().unwrap() > 0.0, "{row}");
        let (rate, memory) = (row["gbps"].as_f64().unwrap(), row["memory_gbps"].as_f64().unwrap());
        assert!((row["bandwidth_share"].as_f64().unwrap() - rate / memory).abs() < 1e-9, "{row}");
    }
    // The shards of all ranks, with what is replicated.
    assert!(rows[1]["weight_bytes"].as_u64() >= rows[0]["weight_bytes"].as_u64(), "{text}");
    let refused = shardwise(&["bench", "decode", "/no/such/model"]);
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("/no/such/model"));
}

#[test]
fn help_shows_examples_and_mistakes_are_explained() {
    let help = String::from_utf8(shardwise(&["bench", "collectives", "--help"]).stdout).unwrap();
    assert!(help.contains("Examples:") && help.contains("--ranks"), "{help}");
    let output = shardwise(&["bench", "collectives", "--ranks", "0"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && message.contains("launch at least one rank"), "{message}");
    assert!(!shardwise(&["bench", "collectives", "--mb", "0"]).status.success());
}

#[test]
fn bench_dispatch_prints_every_case() {
    let output = shardwise(&["bench", "dispatch", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let mut expected: Vec<String> = ["add", "matmul", "gelu", "reshape", "softmax", "sum"]
        .iter()
        .flat_map(|op| [format!("local {op}"), op.to_string()])
        .collect();
    expected.push("train matmul-relu-sum".into());
    expected.extend((1..=4).flat_map(|n| [format!("cold matmul {n} axes"), format!("cold add {n} axes")]));
    assert!(expected.iter().all(|case| rows.iter().any(|row| row["case"] == **case)), "{text}");
    assert!(rows.iter().all(|row| row["us"].as_f64().is_some_and(|us| us > 0.0)), "{text}");
}

#[test]
fn ops_lists_operators_and_the_rules_of_one() {
    let output = shardwise(&["ops", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert!(rows.len() >= 170, "{} operators", rows.len());
    let matmul = rows.iter().find(|row| row["name"] == "matmul").expect("matmul");
    assert_eq!((&matmul["differentiable"], &matmul["tier"]), (&true.into(), &1.into()));
    assert!(matmul["pytorch"].to_string().contains("matmul(input, "), "{matmul}");
    assert!(matmul["free"].to_string().contains("S(1), S(0) -> P(sum)"), "{matmul}");
    let output = shardwise(&["ops", "matmul", "--json"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.contains("\"S(0), S(1)\"") && line.contains("all_gather")), "{text}");
    let table = String::from_utf8(shardwise(&["ops"]).stdout).unwrap();
    let wide: Vec<&str> = table.lines().filter(|line| line.chars().count() > 80).collect();
    assert!(table.lines().count() == rows.len() + 1 && wide.is_empty(), "{wide:?}");
    let unknown = shardwise(&["ops", "matmull"]);
    let message = String::from_utf8_lossy(&unknown.stderr).to_string();
    assert!(!unknown.status.success() && message.contains("matmull") && message.contains("matmul"), "{message}");
}
