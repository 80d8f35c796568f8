//! Reports: what they say equals the trace and the memory of the ranks; dumps of failed runs.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;
use shardwise::comm::{RankDump, SpanKind};
use shardwise::mesh::{Link, Network};
use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelSpec, ParallelismConfig, StepOptions, build, report_step,
};
use shardwise::optim::AdamW;
use shardwise::prelude::*;
use shardwise::report::{LaneKind, MemoryPoint, RunReport, dry_step, page, read_page};
use shardwise::train::Trainer;
use shardwise_test_suites::scratch::Scratch;

fn config() -> GptConfig {
    GptConfig { n_layers: 2, d_model: 32, d_ff: 64, seq_len: 8, vocab_size: 64, ..GptConfig::default() }
}

fn parallelism() -> ParallelismConfig {
    ParallelismConfig { data_parallel: DataParallelMode::FullyShard, tensor_parallel: true, sequence_parallel: false }
}

/// Per rank: nanoseconds, waiting nanoseconds and bytes of all collectives by name, and the peak memory by kind.
type Measured = (BTreeMap<String, [u64; 3]>, [usize; 5], usize);

/// The report of one training step on 2 x 2 ranks, and what the traces and the memory of the ranks say.
fn profiled() -> (RunReport, Vec<Measured>) {
    let mesh = Mesh::new([("dp", 2), ("tp", 2)]).unwrap();
    let plan = parallelism().plan(&config(), &mesh).unwrap();
    let ran = ThreadWorld::new(4).unwrap().run(move |world| {
        let mesh = world.device_mesh(mesh.clone())?;
        let model = build(&config(), &plan, &mesh, DType::F32)?;
        let optimizer = ShardedOptimizer::new(model.named_parameters(), AdamW::default())?;
        let batch = config().example_batch(4, &mesh)?;
        let mut trainer = Trainer::new(model, optimizer).clip_norm(1.0);
        trainer.step(&batch)?;
        world.trace().clear();
        world.memory().reset_peak();
        let (_, profile) = world.profile(|| trainer.step(&batch))?;
        let mut totals = BTreeMap::new();
        for (_, call, total) in world.trace().report().0 {
            let sum: &mut [u64; 3] = totals.entry(call.to_string()).or_default();
            let add = [total.duration.as_nanos() as u64, total.waiting.as_nanos() as u64, total.bytes as u64];
            sum.iter_mut().zip(add).for_each(|(sum, add)| *sum += add);
        }
        let measured = (totals, world.memory().peak_by_kind().as_array(), world.memory().peak());
        let report = RunReport::new("gpt", &mesh, &trainer.model, &profile)?.gather(&world)?;
        Ok((report, measured))
    });
    let (reports, measured): (Vec<_>, Vec<_>) = ran.unwrap().into_iter().unzip();
    assert!(reports[1..].iter().all(Option::is_none));
    (reports.into_iter().next().unwrap().unwrap(), measured)
}

/// Sums of `dur` in nanoseconds over the events of a lane of the Perfetto trace, by rank and name.
fn sums(trace: &Value, category: &str) -> BTreeMap<(u64, String), u64> {
    let mut found = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        if event["ph"] == "X" && event["cat"] == category {
            let key = (event["pid"].as_u64().unwrap(), event["name"].as_str().unwrap().to_string());
            *found.entry(key).or_default() += (event["dur"].as_f64().unwrap() * 1e3).round() as u64;
        }
    }
    found
}

#[test]
fn perfetto_and_time_line_have_the_sums_of_the_trace() {
    let (report, measured) = profiled();
    let trace: Value = serde_json::from_str(&report.to_perfetto()).unwrap();
    let (spans, moving, waiting) = (sums(&trace, "collective"), sums(&trace, "moving"), sums(&trace, "waiting"));
    assert_eq!((report.ranks.len(), measured.len()), (4, 4));
    for (rank, (totals, ..)) in measured.iter().enumerate() {
        assert!(totals.len() >= 3, "{totals:?}");
        let key = |call: &String| (rank as u64, call.clone());
        for (call, [duration, waited, _]) in totals {
            assert_eq!(spans[&key(call)], *duration, "{call} of rank {rank}");
            assert_eq!(waiting.get(&key(call)).copied().unwrap_or(0), *waited, "{call} of rank {rank}");
            assert_eq!(moving[&key(call)], duration - waited, "{call} of rank {rank}");
        }
        let of_rank = &report.ranks[rank];
        assert_eq!(of_rank.rank, rank);
        let in_lane = |lane| of_rank.lanes.iter().filter(|s| s.0 == lane).map(|s| s.2).sum::<u64>();
        let sum = |index: usize| totals.values().map(|total| total[index]).sum::<u64>();
        assert_eq!((of_rank.waiting, in_lane(LaneKind::Waiting)), (sum(1), sum(1)));
        assert_eq!((of_rank.moving, in_lane(LaneKind::Moving)), (sum(0) - sum(1), sum(0) - sum(1)));
        assert_eq!(of_rank.compute, in_lane(LaneKind::Compute));
        assert!(of_rank.compute > 0 && of_rank.compute + sum(0) <= of_rank.duration);
        assert_eq!(of_rank.traffic.iter().map(|row| row.bytes).sum::<u64>(), sum(2));
        let sent = report.matrix.iter().filter(|entry| entry.0 == rank).map(|entry| entry.2).sum::<u64>();
        assert_eq!(sent, sum(2), "bytes of rank {rank} in the matrix");
    }
    let names = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "M").count();
    assert_eq!(names, 4 * 5, "a name for every process and lane");
}

#[test]
fn the_memory_of_a_report_is_that_of_the_rank() {
    let (report, measured) = profiled();
    for (rank, (_, by_kind, peak)) in report.ranks.iter().zip(measured) {
        assert_eq!(rank.peak.bytes as usize, peak);
        assert_eq!(rank.peak.by_kind.map(|bytes| bytes as usize), by_kind);
        let largest = rank.memory.iter().map(|point| point.1.iter().sum::<u64>()).max().unwrap();
        assert_eq!(largest as usize, peak);
        let listed: u64 = rank.peak.sites.iter().map(|site| site.bytes).sum();
        assert!(listed as usize <= peak && listed as usize * 10 > peak * 9, "{listed} of {peak}");
        assert!(
            rank.peak.sites.iter().any(|site| site.operator != "-" && site.site.contains(".rs:")),
            "{:?}",
            rank.peak.sites
        );
    }
}

#[test]
fn operators_redistributions_and_collectives_nest_with_layouts_modules_lines_and_reasons() {
    let (report, _) = profiled();
    let rank = &report.ranks[0];
    let text = |number: Option<u32>| number.map(|number| rank.strings[number as usize].as_str());
    let names: std::collections::BTreeSet<_> = rank.spans.iter().filter_map(|s| text(Some(s.name))).collect();
    let product = rank.spans.iter().find(|s| s.kind == SpanKind::Operator && s.inputs.len() >= 2);
    let product = product.unwrap_or_else(|| panic!("{names:?}"));
    assert!(product.inputs.len() >= 2 && product.outputs.len() == 1 && product.flops > 0);
    let key = text(product.outputs.first().copied()).unwrap();
    assert_eq!(report.layouts[key].ranks.len(), 4, "{key}");
    let collectives: Vec<_> = rank.spans.iter().filter(|s| s.kind == SpanKind::Collective).collect();
    assert!(collectives.iter().all(|s| s.axes.is_some() && s.site.is_some()));
    let moved = rank.spans.iter().filter(|s| s.kind == SpanKind::Redistribution);
    let mut plans = 0;
    for span in moved {
        let plan = &report.redistributions[text(span.redistribution).expect("a plan")];
        assert!(!plan.steps.is_empty());
        plans += 1;
    }
    assert!(plans > 3, "{plans} redistributions");
    assert!(rank.spans.iter().any(|s| text(s.module).is_some_and(|m| m.contains("blocks.1"))));
    assert!(rank.spans.iter().any(|s| s.reason.is_some()));
    for (index, span) in rank.spans.iter().enumerate() {
        let Some(parent) = span.parent.map(|parent| parent as usize) else { continue };
        assert!(parent < index);
        let outer = &rank.spans[parent];
        assert!(outer.start <= span.start && span.start + span.duration <= outer.start + outer.duration);
    }
}

#[test]
fn nothing_is_recorded_outside_of_a_profile() {
    launch(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = DTensor::ones((4, 4), DType::F32, &mesh, [Shard(0)])?;
        let before = x.exp()?;
        let ((), profile) = world.profile(|| Ok(()))?;
        assert!(profile.spans.is_empty() && profile.memory.is_empty());
        let (_, profile) = world.profile(|| before.exp())?;
        drop(before.exp()?);
        assert_eq!(profile.spans.iter().map(|span| span.name).collect::<Vec<_>>(), ["exp"]);
        // An error ends the scope, too.
        world.profile(|| x.matmul(&x.narrow(0, 0, 2)?)).unwrap_err();
        let (_, profile) = world.profile(|| before.exp())?;
        assert_eq!(profile.spans.len(), 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_page_is_one_file_from_which_the_report_can_be_read() {
    let (mut report, _) = profiled();
    report.title = "</script><b>&".to_string();
    let text = page(&[report.clone()], &[]);
    assert!(text.starts_with("<!doctype html>") && !text.contains("</script><b>"));
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        let own = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!own.contains(outside), "{outside}");
    }
    let (runs, failures) = read_page(&text).unwrap();
    assert!(failures.is_empty());
    assert_eq!(serde_json::to_string(&runs[0]).unwrap(), serde_json::to_string(&report).unwrap());
    assert!(read_page("<html></html>").unwrap_err().to_string().contains("page without data"));
}

#[test]
fn the_report_of_a_dry_step_has_the_times_and_the_memory_of_its_plan() {
    let mesh = Mesh::new([("dp", 512), ("tp", 2)]).unwrap();
    let plan = parallelism().plan(&config(), &mesh).unwrap();
    let options = StepOptions::new(512, Network::THREADS).optimizer(AdamW::default());
    let report = dry_step("gpt", &config(), &plan, &mesh, &options).unwrap();
    let expected = report_step(("gpt", &config()), ("fsdp+tp", &plan), &mesh, &options).unwrap();
    let rank = &report.ranks[0];
    let close = |ns: u64, us: f64| (ns as f64 / 1e3 - us).abs() < 1.0 + 1e-3 * us;
    assert!(close(rank.compute, expected.compute_us()), "{} ns, {} us", rank.compute, expected.compute_us());
    assert!(close(rank.moving, expected.communication_us()), "{} ns, {} us", rank.moving, expected.communication_us());
    assert_eq!((rank.waiting, rank.compute + rank.moving), (0, rank.duration));
    assert_eq!(rank.peak.bytes as usize, expected.peak_bytes());
    assert_eq!(rank.peak.by_kind.map(|bytes| bytes as usize), expected.peak.as_array());
    assert_eq!((report.size, report.axes[0].size, report.parameters.len()), (1024, 512, expected.parameters.len()));
}

/// Runs a program that fails on 3 ranks and returns its dumps.
fn dumps(name: &str, deadline: Duration, program: fn(World) -> Result<()>) -> Vec<RankDump> {
    let directory = Scratch::new(name);
    let world = ThreadWorld::new(3).unwrap().deadline(deadline).dump_dir(&directory.0);
    world.run(program).unwrap_err();
    let dumps = RankDump::read_all(&directory.0).unwrap();
    assert_eq!(dumps.iter().map(|dump| (dump.rank, dump.size)).collect::<Vec<_>>(), [(0, 3), (1, 3), (2, 3)]);
    dumps
}

fn number() -> Result<candle_core::Tensor> {
    Ok(candle_core::Tensor::new(1f32, &candle_core::Device::Cpu)?)
}

#[test]
fn a_mismatch_leaves_the_call_of_every_rank() {
    let dumps = dumps("dump-mismatch", Duration::from_secs(30), |world| {
        world.barrier()?;
        match world.rank() {
            1 => world.barrier(),
            _ => world.all_reduce(&number()?, ReduceOp::Sum).map(drop),
        }
    });
    let pending = |rank: usize| dumps[rank].pending.as_ref().unwrap().call.as_str();
    assert_eq!((pending(0), pending(1), pending(2)), ("all_reduce", "barrier", "all_reduce"));
    for dump in &dumps {
        assert!(dump.error.as_ref().unwrap().contains("ranks disagree"), "{dump:?}");
        assert_eq!(dump.recent.iter().map(|call| call.call.as_str()).collect::<Vec<_>>(), ["barrier"]);
        assert!(dump.pending.as_ref().unwrap().site.contains("report.rs:"));
    }
}

#[test]
fn a_panic_is_marked_as_the_first_failure_and_unreceived_messages_are_listed() {
    let dumps = dumps("dump-panic", Duration::from_secs(30), |world| {
        if world.rank() == 2 {
            world.send(&number()?, 0, 7)?;
            panic!("on purpose");
        }
        world.barrier()
    });
    let first: Vec<usize> = dumps.iter().filter(|dump| dump.is_first).map(|dump| dump.rank).collect();
    assert_eq!(first, [2]);
    assert!(dumps[2].error.as_ref().unwrap().contains("on purpose"));
    assert_eq!((dumps[2].unreceived[0].to, dumps[2].unreceived[0].tag), (0, 7));
    assert_eq!(dumps[2].recent.last().unwrap().call, "send");
    assert_eq!(dumps[0].pending.as_ref().unwrap().call, "barrier");
    let shown = page(&[], &dumps);
    assert_eq!(read_page(&shown).unwrap().1, dumps);
}

#[test]
fn a_rank_that_never_joins_is_dumped_with_its_last_calls() {
    let dumps = dumps("dump-timeout", Duration::from_millis(300), |world| {
        world.barrier()?;
        if world.rank() == 0 {
            // Longer than the deadline, after which its thread is abandoned.
            std::thread::sleep(Duration::from_secs(20));
        }
        world.barrier()
    });
    assert!(dumps[0].error.as_ref().unwrap().contains("did not return"), "{:?}", dumps[0]);
    assert_eq!((dumps[0].pending.as_ref(), dumps[0].recent.len()), (None, 1));
    for dump in &dumps[1..] {
        assert!(dump.error.as_ref().unwrap().contains("waited 300ms for rank(s) [0]"), "{dump:?}");
        assert_eq!(dump.pending.as_ref().unwrap().group, [0, 1, 2]);
    }
}

/// A model of one ragged parameter.
#[derive(Module)]
struct RaggedLayer {
    weight: Param,
}

fn ragged() -> RunReport {
    let ran = launch(3, |world| {
        let mesh = world.mesh([("ep", 3)])?;
        let weight = DTensor::randn((8, 4), &mesh, [Placement::ragged(0, [1, 5, 2])])?;
        let layer = RaggedLayer { weight: Param::new(&weight) };
        let x = DTensor::randn((6, 4), &mesh, [Shard(0)])?;
        let (_, profile) = world.profile(|| {
            let y = x.matmul(&layer.weight.get().t()?)?;
            y.redistribute([Replicate])?.square()?.sum_all()?.backward()
        })?;
        RunReport::new("a ragged layer", &mesh, &layer, &profile)?.gather(&world)
    });
    ran.unwrap().unwrap()
}

/// The step of a model of the size of Llama 3 70B on 16384 ranks.
fn dry_70b() -> RunReport {
    let config = LlamaConfig {
        vocab_size: 128_256,
        seq_len: 8192,
        d_model: 8192,
        n_layers: 80,
        n_heads: 64,
        n_kv_heads: 8,
        d_ff: 28_672,
        ..LlamaConfig::default()
    };
    let mesh = Mesh::new([("dp", 2048), ("tp", 8)]).unwrap();
    let plan = parallelism().plan(&config, &mesh).unwrap();
    let links = [Link { latency_us: 20.0, gb_per_s: 50.0 }, Link { latency_us: 5.0, gb_per_s: 450.0 }];
    let options = StepOptions::new(2048, Network::THREADS).links(links).dtype(DType::BF16).flops_per_s(4e14);
    let options = options.optimizer(AdamW::default());
    dry_step("llama 70B on dp=2048,tp=8", &config, &plan, &mesh, &options).unwrap()
}

/// Pages of several programs, which `scripts/check-report` opens in a browser.
/// The report, with a peak of its first rank that lasts a nanosecond.
fn with_spike(mut report: RunReport) -> RunReport {
    let rank = &mut report.ranks[0];
    let at = rank.duration / 2;
    let next = rank.memory.iter().position(|point| point.0 > at + 1).unwrap();
    let before = rank.memory[next - 1].1;
    let mut high = before;
    high[3] += 10 * rank.peak.bytes;
    rank.memory.splice(next..next, [MemoryPoint(at, high), MemoryPoint(at + 1, before)]);
    (rank.peak.at, rank.peak.bytes, rank.peak.by_kind) = (at, high.iter().sum(), high);
    report
}

#[test]
fn pages_of_several_programs_are_written_and_small() {
    let scratch = Scratch::new("pages");
    let directory =
        std::env::var_os("SHARDWISE_REPORT_DIR").map_or_else(|| scratch.0.clone(), std::path::PathBuf::from);
    let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
    let (gpt, _) = profiled();
    let large = dry_70b();
    let text = page(std::slice::from_ref(&large), &[]);
    write("dry-70b.html", &text);
    let (spans, lanes) = (large.ranks[0].spans.len(), large.ranks[0].lanes.len());
    assert!(text.len() < 5_000_000, "{} bytes, {spans} spans, {lanes} stretches", text.len());
    let mut other = gpt.clone();
    other.title = "gpt again".to_string();
    write("compared.html", &page(&[gpt.clone(), other], &[]));
    write("spike.html", &page(&[with_spike(gpt.clone())], &[]));
    let text = page(&[gpt], &[]);
    assert!(["KiB", "MiB", "GiB"].iter().all(|unit| !text.contains(unit)), "the command prints decimal units");
    write("gpt.html", &text);
    write("ragged.html", &page(&[ragged()], &[]));
    let failed = dumps("dump-of-page", Duration::from_secs(30), |world| match world.rank() {
        2 => panic!("on purpose"),
        _ => world.barrier(),
    });
    write("failure.html", &page(&[], &failed));
}
