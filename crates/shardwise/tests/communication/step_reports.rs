//! Reports of training steps from dry runs: memory equals that of the real step, sizes those of published models.

use std::time::{Duration, Instant};

use shardwise::comm::{Phase, record_communication};
use shardwise::mesh::{Link, Network};
use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelConfig, ModelSpec, ParallelismConfig, PretrainedConfig, StepOptions,
    build, report_step,
};
use shardwise::optim::{AdamW, ParamGroup};
use shardwise::plan::StepReport;
use shardwise::prelude::*;
use shardwise::train::Trainer;

const BATCH: usize = 8;

fn plans() -> [(&'static str, &'static str, ParallelismConfig); 4] {
    let plan =
        |data_parallel, tensor_parallel| ParallelismConfig { data_parallel, tensor_parallel, sequence_parallel: false };
    [
        ("ddp", "dp=4", plan(DataParallelMode::Replicate, false)),
        ("fsdp", "dp=4", plan(DataParallelMode::FullyShard, false)),
        ("tp", "dp=2,tp=2", plan(DataParallelMode::Replicate, true)),
        ("fsdp+tp", "dp=2,tp=2", plan(DataParallelMode::FullyShard, true)),
    ]
}

fn gpt() -> ModelConfig {
    ModelConfig::Gpt(GptConfig { seq_len: 32, d_model: 64, d_ff: 256, n_layers: 2, ..GptConfig::default() })
}

fn llama() -> ModelConfig {
    ModelConfig::Llama(LlamaConfig { seq_len: 32, d_model: 64, d_ff: 176, n_layers: 2, ..LlamaConfig::default() })
}

/// Peak memory of each rank over a training step that is not the first one.
fn real_peaks(config: &ModelConfig, plan: &shardwise::plan::ShardingPlan, mesh: &Mesh) -> Vec<usize> {
    let (config, plan, mesh) = (config.clone(), plan.clone(), mesh.clone());
    let program = move |world: World| {
        let mesh = world.device_mesh(mesh.clone())?;
        let model = build(&config, &plan, &mesh, DType::F32)?;
        let optimizer = ShardedOptimizer::new(model.named_parameters(), AdamW::default())?;
        let mut trainer = Trainer::new(model, optimizer);
        let batch = config.example_batch(BATCH, &mesh)?;
        trainer.step(&batch)?;
        world.memory().reset_peak();
        trainer.step(&batch)?;
        Ok(world.memory().peak())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap()
}

#[test]
fn memory_is_that_of_the_real_step() {
    for config in [gpt(), llama()] {
        for (name, mesh, parallelism) in plans() {
            let mesh: Mesh = mesh.parse().unwrap();
            let plan = parallelism.plan(&config, &mesh).unwrap();
            let options = StepOptions::new(BATCH, Network::THREADS).optimizer(AdamW::default());
            let report = report_step((config.name(), &config), (name, &plan), &mesh, &options).unwrap();
            let real = *real_peaks(&config, &plan, &mesh).iter().max().unwrap() as f64;
            let planned = report.peak_bytes() as f64;
            assert!((planned / real - 1.0).abs() < 0.05, "{} {name}: planned {planned}, real {real}", config.name());
            check_report(&report);
        }
    }
}

/// Sums of a report agree with each other, its text is narrow, and its JSON is complete.
fn check_report(report: &StepReport) {
    assert_eq!(report.held.optimizer_state, 2 * report.held.parameters, "two moments in f32\n{report}");
    assert_eq!(report.held.parameters, report.parameters.iter().map(|p| p.bytes).sum::<usize>());
    assert_eq!(report.held.gradients, 0, "no gradient outlives the step");
    assert!(report.largest.gradients >= report.held.parameters && report.largest.activations > 0, "{report}");
    let largest = report.timeline.iter().map(|sample| sample.bytes.total()).max().unwrap();
    assert_eq!(largest, report.peak_bytes());
    let sent: usize = report.calls.iter().map(|call| call.bytes).sum();
    assert_eq!(report.traffic.iter().map(|row| row.bytes).sum::<usize>(), sent);
    assert!((report.communication_us() - report.calls.iter().map(|c| c.us).sum::<f64>()).abs() < 1e-6);
    assert!(report.overlapped_us() <= report.us() && report.overlapped_us() >= report.us() / 2.0);
    let text = report.to_string();
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let json = serde_json::to_string(report).unwrap();
    assert_eq!(serde_json::from_str::<StepReport>(&json).unwrap(), *report);
}

fn published(name: &str) -> PretrainedConfig {
    let path = format!("{}/tests/data/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    PretrainedConfig::read(path).unwrap()
}

#[test]
fn parameter_counts_are_the_published_ones() {
    let counts = [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt2-xl", 1_557_611_200),
    ];
    for (name, expected) in counts {
        let config = published(name);
        let run = shardwise::DryWorld::new(1).unwrap().run(|world| {
            let mesh = world.mesh([("dp", 1)])?;
            Ok(config.build(&Builder::new(&mesh))?.parameter_count())
        });
        assert_eq!(run.unwrap().value, expected, "{name}");
    }
}

/// The experts of a backward pass may be on different ranks, each of which computes a share of the rows.
#[test]
fn operations_of_experts_are_those_of_their_rows() {
    let config = ModelConfig::Pretrained { config: published("mixtral-8x7b"), seq_len: 4096 };
    let mesh: Mesh = "dp=8,tp=8".parse().unwrap();
    let plan = plans()[3].2.plan(&config, &mesh).unwrap();
    let options = StepOptions::new(8, Network::THREADS).dtype(DType::BF16);
    let report = report_step(("mixtral-8x7b", &config), ("fsdp+tp", &plan), &mesh, &options).unwrap();
    let flops = |phase: Phase| report.phases.iter().find(|p| p.phase == phase).unwrap().flops as f64;
    // Two operations per token and parameter in use, of which the published number is 12.9 billion; attention adds 7 %.
    let expected = 2.0 * 12.9e9 * (8 * 4096) as f64 / 64.0;
    let forward = flops(Phase::Forward) / expected;
    assert!((1.0..1.1).contains(&forward), "{forward}");
    // Two products for every one, and the products inside an expert once more.
    let backward = flops(Phase::Backward) / flops(Phase::Forward);
    assert!((2.0..3.0).contains(&backward), "{backward}");
}

#[test]
fn seventy_billion_parameters_on_16384_ranks_are_planned_in_seconds() {
    let config = ModelConfig::Pretrained { config: published("llama-3-70b"), seq_len: 8192 };
    let mesh: Mesh = "dp=2048,tp=8".parse().unwrap();
    let start = Instant::now();
    let parallelism = plans()[3].2;
    let plan = parallelism.plan(&config, &mesh).unwrap();
    let group = ParamGroup::from(AdamW::default()).with_master();
    let links = [Link { latency_us: 5.0, gb_per_s: 50.0 }, Link { latency_us: 2.0, gb_per_s: 400.0 }];
    let options =
        StepOptions::new(2048, Network::THREADS).dtype(DType::BF16).optimizer(group).links(links).flops_per_s(400e12);
    let report = report_step(("llama-3-70b", &config), ("fsdp+tp", &plan), &mesh, &options).unwrap();
    let elapsed = start.elapsed();
    println!("{report}\nin {elapsed:?}");
    // Two cores with other work on them: an idle machine takes a few seconds.
    assert!(elapsed < Duration::from_secs(60), "{elapsed:?}");
    // Only norms are replicated, so a rank holds a little more than its share.
    let share = 70_553_706_496 * 2 / 16_384;
    assert!(report.held.parameters >= share && report.held.parameters < share + (4 << 20), "{report}");
    assert_eq!(report.parameter_count, 70_553_706_496);
    assert!(report.traffic.iter().any(|row| row.axes == "dp" && row.call == "all_gather"), "{report}");
    assert!(report.traffic.iter().any(|row| row.axes == "tp"), "{report}");
    assert!(serde_json::to_string(&report).unwrap().len() < 5_000_000);
}

#[test]
fn every_record_has_its_module_phase_axes_and_reason() {
    launch(4, |world| {
        let mesh: Mesh = "dp=2,tp=2".parse()?;
        let config = gpt();
        let plan = plans()[3].2.plan(&config, &mesh)?;
        let mesh = world.device_mesh(mesh)?;
        let model = build(&config, &plan, &mesh, DType::F32)?;
        let mut optimizer = ShardedOptimizer::new(model.named_parameters(), AdamW::default())?;
        let batch = config.example_batch(BATCH, &mesh)?;
        let (result, records) = record_communication(|| {
            use shardwise::models::Model;
            optimizer.step(model.batch_loss(&batch)?.backward()?)
        });
        result?;
        let some = |phase: Phase, call: &str, axes: &str, module: &str| {
            records.iter().any(|r| {
                let fits = r.phase == phase && r.call == call && r.axes.as_deref() == Some(axes);
                fits && r.module.as_deref().is_some_and(|path| path.starts_with(module))
            })
        };
        assert!(some(Phase::Forward, "all_gather", "dp", "blocks.0."), "{records:#?}");
        assert!(some(Phase::Backward, "reduce_scatter", "dp", "blocks.1."), "{records:#?}");
        assert!(records.iter().all(|r| r.axes.is_some()), "{records:#?}");
        let gathered = records.iter().find(|r| r.phase == Phase::Forward && r.call == "all_gather").unwrap();
        let reason = gathered.reason.as_deref().unwrap_or_default();
        assert!(reason.contains("redistributes input") && reason.contains("because"), "{reason}");
        assert!(gathered.layouts.is_some());
        Ok(())
    })
    .unwrap();
}

#[test]
fn operators_say_why_they_move_data_and_why_results_are_partial() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(1)])?;
        let w = DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?;
        assert_eq!(x.why(), None);
        // Of a replicated operand ranks take their part: the sharded one is the reason.
        let replicated = DTensor::ones((4, 8), DType::F32, &mesh, [Replicate])?;
        let why = replicated.matmul(&w)?.why().unwrap().to_string();
        assert!(why.contains("reduces over dimension 0 of input 1, which is sharded over tp"), "{why}");
        let sum = x.matmul(&w)?;
        let why = sum.why().unwrap().to_string();
        assert!(
            why.starts_with("the result is P(sum) over tp because matmul reduces over dimension 1 of input 0"),
            "{why}"
        );
        let why = sum.mul_scalar(2.0)?.why().unwrap().to_string();
        assert!(why.contains("because input 0 is"), "{why}");
        let why = sum.exp()?.why().unwrap().to_string();
        assert!(
            why.starts_with("exp redistributes input 0 from P(sum)")
                && why.contains("exp needs the complete value of its P(sum)"),
            "{why}"
        );
        assert_eq!(x.add(&x)?.why(), None);
        Ok(())
    })
    .unwrap();
}
