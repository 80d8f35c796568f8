//! A load reads one consistent checkpoint, detects all corruption, and its errors name path and cause.
//!
//! `SHARDWISE_CONCURRENT_LOADS` sets the number of loads during concurrent saves (default 400; 20000 take a few minutes),
//! `SHARDWISE_FLIP_CASES` the number of flipped bits (default 200; 2000 for all), `SHARDWISE_SEED` the first seed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::checkpoint::{self, ConvertOptions, Format, SaveOptions, State, StateLoadOptions, convert, verify};
use shardwise::prelude::*;
use shardwise::{OwnedBox, TensorBox};
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::own_process::test_arguments;
use shardwise_test_suites::scratch::Scratch;
use shardwise_test_suites::settings::env_or;

/// State of two ranks in which every element is `number`.
fn generation(world: &World, number: i64, format: Format) -> Result<State> {
    let mesh = world.mesh([("dp", world.size())])?;
    let tensor = |i: usize| -> Result<(String, State)> {
        let placement = [Shard(0), Shard(1), Replicate][i % 3].clone();
        let x = DTensor::full(number as f64, (12 + i, 40), DType::F32, &mesh, [placement])?;
        Ok((format!("t{i}"), State::from(x)))
    };
    let mut entries = (0..6).map(tensor).collect::<Result<Vec<_>>>()?;
    if format != Format::HuggingFace {
        entries.push(("generation".to_string(), State::from(number)));
    }
    Ok(State::map(entries))
}

/// Loads repeatedly on three ranks, in another layout, while two ranks of another world save one generation after the other to
/// the same path. Returns how many generations were saved meanwhile.
fn load_while_saving(format: Format, loads: usize) -> i64 {
    let scratch = Scratch::new(&format!("concurrent-{format:?}"));
    let path = scratch.0.join("state");
    let (stop, saved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(0)));
    let save = {
        let (path, saved) = (path.clone(), Arc::clone(&saved));
        move || {
            let (path, number) = (path.clone(), saved.load(SeqCst) + 1);
            launch(2, move |world| {
                let options = SaveOptions { format, ..SaveOptions::default() };
                checkpoint::save_with(&world, &path, &generation(&world, number, format)?, &options)
            })
            .unwrap();
            saved.store(number, SeqCst);
        }
    };
    save();
    let saver = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            while !stop.load(SeqCst) {
                save();
            }
        }
    });
    let loaded = launch(3, move |world| {
        let template = generation(&world, 0, format)?;
        for i in 0..loads {
            let state = checkpoint::load(&world, &path, &template)?;
            let mut found = Vec::new();
            for t in 0..6 {
                let local = state.tensor(&format!("t{t}"))?.to_local()?.flatten_all()?.to_vec1::<f32>()?;
                found.extend(local.into_iter().map(|x| x as i64));
            }
            if format != Format::HuggingFace {
                found.push(state.value("generation")?.read()?);
            }
            // All ranks must have loaded the same generation.
            let range = [*found.iter().max().unwrap(), -*found.iter().min().unwrap()];
            let mine = candle_core::Tensor::new(&range, &candle_core::Device::Cpu)?;
            let range = world.all_reduce(&mine, ReduceOp::Max)?.to_vec1::<i64>()?;
            assert_eq!(range[0], -range[1], "load {i} mixes generations {} to {}", -range[1], range[0]);
        }
        Ok(())
    });
    stop.store(true, SeqCst);
    saver.join().unwrap();
    loaded.unwrap();
    saved.load(SeqCst)
}

#[test]
fn loads_during_saves_read_one_consistent_checkpoint() {
    let loads = env_or("SHARDWISE_CONCURRENT_LOADS", 400usize);
    let saves = load_while_saving(Format::Native, loads);
    println!("{loads} loads by three ranks while {saves} checkpoints were saved: none mixed, none damaged");
    assert!(saves > 3, "saves must happen meanwhile: {saves}");
    // formats whose metadata identifies the content less precisely
    for format in [Format::Dcp, Format::HuggingFace] {
        let saves = load_while_saving(format, loads / 8);
        println!("{} loads in {format:?} while {saves} checkpoints were saved", loads / 8);
    }
}

#[test]
fn an_open_catalog_is_not_affected_by_a_later_save() {
    let scratch = Scratch::new("pinned");
    let path = scratch.0.join("state");
    let save = |number: i64| {
        let path = path.clone();
        launch(2, move |world| checkpoint::save(&world, &path, &generation(&world, number, Format::Native)?)).unwrap();
    };
    save(1);
    let first = checkpoint::open(&path).unwrap();
    save(2);
    for (catalog, expected) in [(&first, 1f32), (&checkpoint::open(&path).unwrap(), 2.0)] {
        for key in catalog.tensors.keys() {
            assert!(catalog.read(key).unwrap().chunks(4).all(|x| x == expected.to_le_bytes()), "{key}");
        }
    }
    // a removed checkpoint, and files removed one by one, are not reported as damage
    std::fs::remove_dir_all(&path).unwrap();
    let error = same_error_on_all_ranks(2, move |world| {
        checkpoint::load(&world, &path, &generation(&world, 0, Format::Native)?).map(drop)
    });
    assert!(error.contains("no such file or directory"), "{error}");
}

/// The tensors of the bit-flip test: several blocks long, of several types.
fn pattern(world: &World, rng: &mut StdRng) -> Result<State> {
    let mesh = world.mesh([("all", world.size())])?;
    let shapes: [(&[usize], DType); 4] =
        [(&[301, 257], DType::F32), (&[70_001], DType::I64), (&[3, 129, 200], DType::BF16), (&[90, 1000], DType::U8)];
    let mut entries = Vec::new();
    for (i, (shape, dtype)) in shapes.into_iter().enumerate() {
        let placement = match rng.random_range(0..=shape.len()) {
            0 => Replicate,
            dim => Shard(dim as isize - 1),
        };
        let whole = DTensor::full((i + 3) as f64, shape, dtype, &mesh, [placement])?;
        entries.push((format!("t{i}"), State::from(whole)));
    }
    entries.push(("step".to_string(), State::from(12)));
    Ok(State::map(entries))
}

fn flips(format: Format, cases: usize, first: u64) {
    let scratch = Scratch::new(&format!("flips-{format:?}"));
    let path = scratch.0.join("state");
    let mut rng = StdRng::seed_from_u64(first);
    let load = |path: PathBuf, seed: u64| {
        let ranks = StdRng::seed_from_u64(seed ^ 77).random_range(1..5);
        launch(ranks, move |world| {
            let template = pattern(&world, &mut StdRng::seed_from_u64(seed))?;
            checkpoint::load(&world, &path, &template).map(drop)
        })
    };
    let (mut files, mut total) = (Vec::new(), 0);
    for case in 0..cases {
        let seed = first * 1_000_003 + case as u64;
        if case % 50 == 0 {
            let (place, ranks) = (path.clone(), rng.random_range(1..5));
            launch(ranks, move |world| {
                let state = pattern(&world, &mut StdRng::seed_from_u64(seed))?;
                checkpoint::save_with(&world, &place, &state, &SaveOptions { format, ..SaveOptions::default() })
            })
            .unwrap();
            let entries = std::fs::read_dir(&path).unwrap().map(|e| e.unwrap());
            files = entries.map(|e| (e.path(), e.metadata().unwrap().len())).collect();
            files.sort();
            total = files.iter().map(|(_, size)| size).sum();
            load(path.clone(), seed + 1).unwrap_or_else(|error| panic!("seed {seed}, no damage: {error}"));
        }
        let mut place = rng.random_range(0..total);
        let hit = files.iter().find(|(_, size)| {
            let is_inside = place < *size;
            place -= if is_inside { 0 } else { *size };
            is_inside
        });
        let (file, bit) = (&hit.unwrap().0, rng.random_range(0..8));
        flip(file, place, bit);
        let loaded = load(path.clone(), seed + 1);
        flip(file, place, bit);
        let error = loaded
            .err()
            .unwrap_or_else(|| panic!("seed {seed}: bit {bit} of byte {place} of {} was not found", file.display()));
        assert!(!error.to_string().contains("panicked"), "seed {seed}: {error}");
    }
    println!("{cases} flipped bits in {format:?} from seed {first}: all found by loads in other layouts");
}

fn flip(file: &Path, place: u64, bit: u32) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, place).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << bit], place).unwrap();
}

#[test]
fn every_flipped_bit_is_found_by_a_load_in_another_layout() {
    let (cases, first) = (env_or("SHARDWISE_FLIP_CASES", 200usize), env_or("SHARDWISE_SEED", 0usize) as u64);
    flips(Format::Native, cases, first);
}

/// Removes the block checksums from a manifest: the form of versions that did not write them.
fn without_blocks(path: &Path) {
    let manifest = path.join("manifest.json");
    let mut sealed: serde_json::Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    for tensor in sealed["content"]["tensors"].as_object_mut().unwrap().values_mut() {
        for chunk in tensor["chunks"].as_array_mut().unwrap() {
            chunk.as_object_mut().unwrap().remove("blocks").expect("checksums of blocks");
        }
    }
    let content = serde_json::to_string(&sealed["content"]).unwrap();
    let crc32 = crc32fast::hash(content.as_bytes());
    std::fs::write(&manifest, format!("{{\"format\":\"shardwise\",\"crc32\":{crc32},\"content\":{content}}}")).unwrap();
}

#[test]
fn checkpoints_without_block_checksums_load_and_report_what_is_unchecked() {
    let scratch = Scratch::new("old");
    let path = scratch.0.join("state");
    let save = |format: Format| {
        let place = path.clone();
        let options = SaveOptions { format, ..SaveOptions::default() };
        launch(2, move |world| {
            let mesh = world.mesh([("all", 2)])?;
            let w = DTensor::arange(0.0..600.0, DType::F32, &mesh, [Shard(0)])?;
            checkpoint::save_with(&world, &place, &State::map([("w", w)]), &options)
        })
        .unwrap();
    };
    // unchecked bytes of three ranks, and of two ranks in the layout that was saved
    let unchecked = |ranks: usize| {
        let path = path.clone();
        let reports = ThreadWorld::new(ranks).unwrap().run(move |world| {
            let mesh = world.mesh([("all", ranks)])?;
            let template = State::map([("w", DTensor::zeros(600, DType::F32, &mesh, [Shard(0)])?)]);
            let loaded = checkpoint::load_with(&world, &path, &template, &StateLoadOptions::default())?;
            let (state, report) = (loaded.state, loaded.report);
            assert_eq!(state.tensor("w")?.full_tensor()?.to_vec1::<f32>()?[599], 599.0);
            assert_eq!(report.unchecked, if report.unchecked_bytes > 0 { vec!["w"] } else { vec![] });
            Ok((report.bytes, report.unchecked_bytes))
        });
        let reports = reports.unwrap();
        assert_eq!(reports.iter().map(|(bytes, _)| bytes).sum::<u64>(), 2400);
        reports.iter().map(|(_, bytes)| bytes).sum::<u64>()
    };
    for format in [Format::Native, Format::Dcp] {
        save(format);
        assert_eq!((unchecked(2), unchecked(3)), (0, 0), "{format:?}");
        let found = verify(&path, &|_| {});
        assert!(found.is_intact() && found.without_block_checksums == 0, "{found:?}");
    }
    save(Format::Native);
    without_blocks(&path);
    assert_eq!((unchecked(2), unchecked(3)), (0, 2400));
    let found = verify(&path, &|_| {});
    assert_eq!((found.is_intact(), found.verified, found.without_block_checksums), (true, 2, 2));
    assert_eq!(checkpoint::open(&path).unwrap().unchecked().collect::<Vec<_>>(), ["w"]);
    save(Format::HuggingFace);
    assert_eq!((unchecked(2), unchecked(3)), (2400, 2400));
}

#[test]
fn a_duplicate_name_in_a_header_is_rejected() {
    let scratch = Scratch::new("twice");
    let tensor = |range: &str| format!("{{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":{range}}}");
    let one = tensor("[0,2]");
    for (name, header) in [
        ("tensor", format!("{{\"a\":{one},\"a\":{one}}}")),
        ("metadata", format!("{{\"__metadata__\":{{}},\"a\":{one},\"__metadata__\":{{}}}}")),
        ("inside", format!("{{\"__metadata__\":{{\"k\":\"1\",\"k\":\"2\"}},\"a\":{one}}}")),
        ("field", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,2]}}".to_string()),
    ] {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(&[1, 2]);
        let path = scratch.0.join(format!("{name}.safetensors"));
        std::fs::write(&path, file).unwrap();
        let error = checkpoint::open(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains("twice") || error.contains("duplicate field"), "{name}: {error}");
    }
}

#[test]
fn a_conversion_writes_the_selected_tensors_with_several_boxes_per_rank() {
    let scratch = Scratch::new("boxes");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(1, move |world| checkpoint::save(&world, &place, &generation(&world, 5, Format::Native)?)).unwrap();
    // rank 0 has the first and the last rows, rank 1 those between
    let cut = |_: &str, shape: &[usize]| {
        let rows = |rank: usize, from: usize, to: usize| OwnedBox {
            rank,
            global: TensorBox { offsets: vec![from, 0], sizes: vec![to - from, shape[1]] },
            local_offsets: vec![0, 0],
        };
        Ok(vec![rows(0, 0, 2), rows(1, 2, 9), rows(0, 9, shape[0])])
    };
    for format in [Format::HuggingFace, Format::Native, Format::Dcp] {
        let to = scratch.0.join(format!("{format:?}"));
        let options = ConvertOptions {
            reshard: Some(Arc::new(cut)),
            select: Arc::new(|name| name == "t1" || name == "t4"),
            ..ConvertOptions::to(format)
        };
        convert(&path, &to, &options, &|_| {}).unwrap();
        let catalog = checkpoint::open(&to).unwrap();
        assert_eq!(catalog.tensors.keys().collect::<Vec<_>>(), ["t1", "t4"], "{format:?}");
        assert_eq!(catalog.tensor("t4").unwrap().chunks.len(), 3);
        assert!(catalog.read("t4").unwrap().chunks(4).all(|x| x == 5f32.to_le_bytes()));
    }
    let none = ConvertOptions { select: Arc::new(|_| false), ..ConvertOptions::to(Format::Native) };
    let error = convert(&path, scratch.0.join("none"), &none, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("none of 6 tensors"), "{error}");
}

/// Environment variable of the process with a file size limit: the path to save to.
const FULL: &str = "SHARDWISE_FULL_TARGET";

/// The process with a file size limit: rank 1 has the most to write.
#[test]
fn child_process_with_a_full_disk() {
    let Some(target) = std::env::var_os(FULL).map(PathBuf::from) else { return };
    let error = same_error_on_all_ranks(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let x = DTensor::zeros(100_000, DType::F32, &mesh, [Placement::ragged(0, [1, 99_999])])?;
        checkpoint::save(&world, &target, &State::map([("x", x)]))
    });
    println!("refused: {error}");
}

#[test]
fn errors_of_full_disks_and_unwritable_paths_name_path_cause_and_rank() {
    let scratch = Scratch::new("full");
    let target = scratch.0.join("state");
    // A limit on file sizes stands in for a full disk: writes fail in the same way.
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(test_arguments(module_path!(), "child_process_with_a_full_disk"))
        .env(FULL, &target)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in ["rank 1", "File too large", "part-00001.safetensors", "free some space"] {
        assert!(said.contains(part), "{part}: {said} {}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(!target.exists());
    let read_only =
        same_error_on_all_ranks(2, move |world| checkpoint::save(&world, "/proc/here/x", &State::map([("a", 1)])));
    assert!(read_only.contains("rank 0") && read_only.contains("/proc/here"), "{read_only}");
}
