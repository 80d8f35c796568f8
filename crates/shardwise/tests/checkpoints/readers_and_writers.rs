//! Readers and writers of one checkpoint at the same time, in every format: every reader sees one save, complete, or an error of
//! the library that says so; never parts of two saves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;

use shardwise::checkpoint::{self, Format, SaveOptions, Series, State, StateLoadOptions, verify};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

const TENSORS: usize = 5;

fn writable() -> Vec<Format> {
    Format::all().into_iter().filter(|format| format.is_writable()).collect()
}

/// Tensors in which every element is `number`, in layouts that the format can hold.
fn generation_in(world: &World, number: u64, format: Format) -> Result<State> {
    let mesh = world.mesh([("dp", world.size())])?;
    let tensor = |i: usize| -> Result<(String, State)> {
        // A file of `torch.save` has whole tensors only.
        let placement =
            if format == Format::Torch { Replicate } else { [Shard(0), Shard(1), Replicate][i % 3].clone() };
        let x = DTensor::full(number as f64, (9 + i, 40), DType::F32, &mesh, [placement])?;
        Ok((format!("t{i}"), State::from(x)))
    };
    Ok(State::map((0..TENSORS).map(tensor).collect::<Result<Vec<_>>>()?))
}

/// A template for loads.
fn generation(world: &World, number: u64) -> Result<State> {
    generation_in(world, number, Format::Native)
}

/// The one number that all elements are.
fn one_number(numbers: impl IntoIterator<Item = f32>, what: &str) -> u64 {
    let (least, most) = numbers.into_iter().fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(x), b.max(x)));
    assert_eq!(least, most, "{what} mixes the saves {least} and {most}");
    most as u64
}

fn local_numbers(state: &State) -> Result<Vec<f32>> {
    let tensor = |i: usize| Ok(state.tensor(&format!("t{i}"))?.to_local()?.flatten_all()?.to_vec1::<f32>()?);
    Ok((0..TENSORS).map(tensor).collect::<Result<Vec<_>>>()?.concat())
}

/// A way to read the checkpoint: the number that it holds.
type Reader = (&'static str, fn(&Path) -> Result<u64>);

fn load_on_ranks(path: &Path, ranks: usize, share_reads: bool) -> Result<u64> {
    let path = path.to_path_buf();
    let of_ranks = ThreadWorld::new(ranks)?.run(move |world| {
        let options = StateLoadOptions { share_reads, ..StateLoadOptions::default() };
        local_numbers(&checkpoint::load_with(&world, &path, &generation(&world, 0)?, &options)?.state)
    })?;
    Ok(one_number(of_ranks.concat(), "a load"))
}

const READERS: [Reader; 6] = [
    ("load", |path| load_on_ranks(path, 3, false)),
    ("load with shared reads", |path| load_on_ranks(path, 2, true)),
    ("load_placed", |path| {
        let path = path.to_path_buf();
        let of_ranks = ThreadWorld::new(2)?.run(move |world| {
            let mesh = world.mesh([("tp", 2)])?;
            let place = |_: &str, shape: &[usize]| Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [Shard(1)])?));
            local_numbers(&checkpoint::load_placed(&world, &path, |_| true, place)?)
        })?;
        Ok(one_number(of_ranks.concat(), "a load that is placed"))
    }),
    ("open", |path| {
        let catalog = checkpoint::open(path)?;
        let mut numbers = Vec::new();
        for key in catalog.tensors.keys() {
            let bytes = catalog.read(key)?;
            numbers.extend(bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().expect("four bytes"))));
        }
        assert_eq!(catalog.tensors.len(), TENSORS);
        Ok(one_number(numbers, "a catalog"))
    }),
    ("verify", |path| {
        let verified = verify(path, &|_| {});
        match (verified.problems.first(), verified.catalog) {
            (None, Some(catalog)) => {
                assert_eq!(catalog.tensors.len(), TENSORS);
                Ok(0)
            }
            (Some(problem), _) => Err(Error::other(problem.clone())),
            (None, None) => Err(Error::other("no catalog and no problem")),
        }
    }),
    ("a save of what was loaded", |path| {
        // Another program copies the checkpoint to another place while it changes.
        static COPIES: AtomicUsize = AtomicUsize::new(0);
        let copy = path.with_file_name(format!("copy-{}", COPIES.fetch_add(1, SeqCst)));
        let (from, to) = (path.to_path_buf(), copy.clone());
        ThreadWorld::new(2)?.run(move |world| {
            let state = checkpoint::load(&world, &from, &generation(&world, 0)?)?;
            checkpoint::save(&world, &to, &state)
        })?;
        let number = load_on_ranks(&copy, 1, false)?;
        std::fs::remove_dir_all(&copy)?;
        Ok(number)
    }),
];

fn save(path: &Path, number: u64, format: Format, ranks: usize) {
    let path = path.to_path_buf();
    let run = move |world: World| {
        let options = SaveOptions { format, ..SaveOptions::default() };
        checkpoint::save_with(&world, &path, &generation_in(&world, number, format)?, &options)
    };
    ThreadWorld::new(ranks).unwrap().run(run).unwrap();
}

/// Saves one generation after the other to `path` in the given formats, while all readers read. A reader may not fail: the path has a
/// complete checkpoint at every moment.
fn read_while_saving(name: &str, formats: &'static [Format], rounds: usize) {
    let scratch = Scratch::new(&format!("readers-{name}"));
    let path = scratch.0.join("state");
    save(&path, 1, formats[0], 2);
    let (stop, saved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(1)));
    let writer = {
        let (path, stop, saved) = (path.clone(), Arc::clone(&stop), Arc::clone(&saved));
        thread::spawn(move || {
            while !stop.load(SeqCst) {
                let number = saved.load(SeqCst) + 1;
                save(&path, number, formats[number as usize % formats.len()], 1 + number as usize % 3);
                saved.store(number, SeqCst);
            }
        })
    };
    let readers: Vec<_> = READERS
        .into_iter()
        .map(|(what, read)| {
            let (path, saved) = (path.clone(), Arc::clone(&saved));
            thread::spawn(move || {
                for round in 0..rounds {
                    let before = saved.load(SeqCst);
                    let number = read(&path).map_err(|error| format!("{what}, round {round}: {error}"))?;
                    // One more may be visible before it is counted.
                    let after = saved.load(SeqCst) + 1;
                    let is_current = (before..=after).contains(&number) || what == "verify";
                    assert!(is_current, "{what} read save {number}, which was not between {before} and {after}");
                }
                Ok::<(), String>(())
            })
        })
        .collect();
    let results: Vec<_> = readers.into_iter().map(thread::JoinHandle::join).collect();
    stop.store(true, SeqCst);
    writer.join().unwrap();
    let count = saved.load(SeqCst);
    println!("{name}: {count} saves during {rounds} rounds of {} readers", READERS.len());
    for result in results {
        result.unwrap().unwrap();
    }
    assert!(count > 3, "saves must happen meanwhile: {count}");
}

#[test]
fn readers_see_one_save_in_every_format() {
    let formats = writable();
    assert!(formats.len() >= 3, "{formats:?}");
    for format in formats {
        read_while_saving(format.name(), Vec::leak(vec![format]), 30);
    }
}

#[test]
fn readers_see_one_save_while_the_format_changes() {
    read_while_saving("formats", Vec::leak(writable()), 40);
}

/// A series removes old checkpoints while other processes read them: then a reader gets a newer one or an error that names the files.
#[test]
fn readers_of_a_series_get_a_complete_checkpoint_or_an_error() {
    for format in writable() {
        let scratch = Scratch::new(&format!("series-{}", format.name()));
        let root = scratch.0.clone();
        let stop = Arc::new(AtomicBool::new(false));
        let saved = Arc::new(AtomicU64::new(0));
        let write = {
            let (root, saved) = (root.clone(), Arc::clone(&saved));
            move || {
                let (root, number) = (root.clone(), saved.load(SeqCst) + 1);
                let run = move |world: World| {
                    let options = SaveOptions { format, ..SaveOptions::default() };
                    Series::new(&root).keep(1).options(options).save(
                        &world,
                        number,
                        &generation_in(&world, number, format)?,
                    )
                };
                ThreadWorld::new(2).unwrap().run(run).unwrap();
                saved.store(number, SeqCst);
            }
        };
        write();
        let writer = {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                while !stop.load(SeqCst) {
                    write();
                }
            })
        };
        let latest = |root: &Path| -> Result<Option<PathBuf>> { Series::new(root).latest() };
        let mut outcomes: BTreeMap<&str, usize> = BTreeMap::new();
        let mut wrong = Vec::new();
        for _ in 0..60 {
            let read = match latest(&root) {
                Ok(Some(path)) => load_on_ranks(&path, 3, false).map(|number| (path, number)),
                Ok(None) => {
                    *outcomes.entry("none").or_default() += 1;
                    continue;
                }
                Err(error) => Err(error),
            };
            match read {
                Ok((path, number)) => {
                    *outcomes.entry("read").or_default() += 1;
                    if !path.ends_with(format!("step-{number:08}")) {
                        wrong.push(format!("{} holds save {number}", path.display()));
                    }
                }
                Err(error) => {
                    *outcomes.entry("removed").or_default() += 1;
                    let text = error.to_string();
                    if !text.contains("step-") || text.contains("panicked") || text.contains("checksum") {
                        wrong.push(text);
                    }
                }
            }
        }
        stop.store(true, SeqCst);
        writer.join().unwrap();
        println!("{format}: {outcomes:?} during {} saves", saved.load(SeqCst));
        assert!(wrong.is_empty(), "{format}: {wrong:#?}");
        assert!(outcomes["read"] > 0, "{outcomes:?}");
    }
}

/// Two programs that save to one path: one of both saves is there at the end, and at every moment in between.
#[test]
fn two_writers_leave_one_complete_save() {
    for format in writable() {
        let scratch = Scratch::new(&format!("writers-{}", format.name()));
        let path = scratch.0.join("state");
        save(&path, 1, format, 2);
        let stop = Arc::new(AtomicBool::new(false));
        let failed = Arc::new(AtomicUsize::new(0));
        let writers: Vec<_> = (0..2u64)
            .map(|writer| {
                let (path, stop, failed) = (path.clone(), Arc::clone(&stop), Arc::clone(&failed));
                thread::spawn(move || {
                    let mut number = 10 + writer;
                    while !stop.load(SeqCst) {
                        let place = path.clone();
                        let run = move |world: World| {
                            let options = SaveOptions { format, ..SaveOptions::default() };
                            checkpoint::save_with(&world, &place, &generation_in(&world, number, format)?, &options)
                        };
                        // A save may lose against the other one, with an error on all of its ranks.
                        if let Err(error) = ThreadWorld::new(2).unwrap().run(run) {
                            failed.fetch_add(1, SeqCst);
                            assert!(!error.to_string().contains("panicked"), "{error}");
                        }
                        number += 2;
                    }
                    number
                })
            })
            .collect();
        let mut wrong = Vec::new();
        for _ in 0..40 {
            wrong.extend(load_on_ranks(&path, 3, false).err().map(|error| error.to_string()));
        }
        stop.store(true, SeqCst);
        let saves: Vec<u64> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        println!("{format}: {saves:?}, {} of them failed", failed.load(SeqCst));
        assert!(wrong.is_empty(), "{format}: {wrong:#?}");
        let last = load_on_ranks(&path, 2, true).unwrap();
        assert!(last >= 10 && last <= *saves.iter().max().unwrap(), "{last}");
    }
}
