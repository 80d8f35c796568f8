//! Peak memory of loading and converting checkpoints.
//!
//! `SHARDWISE_CONVERT_MB` sets the size of the checkpoint that is converted (default 768; 4096 takes about a minute).

use std::path::PathBuf;

use shardwise::checkpoint::{self, ConvertOptions, ElementType, Format, State, convert};
use shardwise::prelude::*;
use shardwise_test_suites::own_process::is_alone;
use shardwise_test_suites::process_memory::process_memory;
use shardwise_test_suites::settings::env_or;

const MB: usize = 1_000_000;

fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("shardwise-memory-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn loading_needs_memory_for_the_loaded_shards_and_converting_little_more() {
    if !is_alone(module_path!(), "loading_needs_memory_for_the_loaded_shards_and_converting_little_more") {
        return;
    }
    let root = scratch("load");
    let (path, side, count) = (root.join("state"), 2000, 12); // 16 MB each
    let whole = side * side * 4 * count;
    let place = path.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let one = |i: usize| Ok((format!("t{i}"), DTensor::full(1.0, (side, side), DType::F32, &mesh, [Shard(0)])?));
        checkpoint::save(&world, &place, &State::map((0..count).map(one).collect::<Result<Vec<_>>>()?))
    })
    .unwrap();
    for placement in [Shard(0), Shard(1)] {
        let place = path.clone();
        let (before, peak) = launch_measured(move |world| {
            let mesh = world.mesh([("all", 2)])?;
            let in_layout =
                |_: &str, shape: &[usize]| Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [placement.clone()])?));
            checkpoint::load_placed(world, &place, |_| true, in_layout)
        });
        let taken = peak.saturating_sub(before);
        println!("loading {} MB on 2 ranks took {} MB at most", whole / MB, taken / MB);
        assert!(taken <= whole + 2 * 64 * MB, "{} MB", taken / MB);
    }
    std::fs::remove_dir_all(&root).unwrap();

    let megabytes: usize = env_or("SHARDWISE_CONVERT_MB", 768);
    let root = scratch("convert");
    let path = root.join("large");
    // A sparse file is a cheap large checkpoint; saving one would need its size in memory.
    let header = format!(
        "{{\"w\":{{\"dtype\":\"F32\",\"shape\":[{},250000],\"data_offsets\":[0,{}]}}}}",
        megabytes,
        megabytes * MB
    );
    std::fs::create_dir(&path).unwrap();
    let file = std::fs::File::create(path.join("model.safetensors")).unwrap();
    std::io::Write::write_all(&mut &file, &(header.len() as u64).to_le_bytes()).unwrap();
    std::io::Write::write_all(&mut &file, header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + megabytes * MB) as u64).unwrap();
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let mesh = Mesh::new([4]).unwrap();
    let options = ConvertOptions {
        element: Some(ElementType::BF16),
        reshard: Some(std::sync::Arc::new(move |_, shape| {
            Ok(Layout::new(&mesh, shape, [Shard(1)])?.primary_boxes().collect())
        })),
        ..ConvertOptions::to(Format::Native)
    };
    let done = convert(&path, root.join("small"), &options, &|_| {}).unwrap();
    let peak = process_memory().1;
    println!("converting {megabytes} MB to {} MB had {} MB resident at most", done.bytes as usize / MB, peak / MB);
    assert!(peak < 512 * MB, "{} MB", peak / MB);
    std::fs::remove_dir_all(&root).unwrap();
}

/// Runs a load on two ranks; returns the memory before it and the peak during it.
fn launch_measured(load: impl Fn(&World) -> Result<State> + Send + Sync + 'static) -> (usize, usize) {
    launch(2, move |world| {
        world.barrier()?;
        if world.rank() == 0 {
            std::fs::write("/proc/self/clear_refs", "5")?;
        }
        let before = process_memory().0;
        world.barrier()?;
        let state = load(&world)?;
        world.barrier()?;
        let peak = process_memory().1;
        drop(state);
        Ok((before, peak))
    })
    .unwrap()
}
