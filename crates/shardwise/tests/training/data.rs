//! Batches: the same on every mesh, loaded only by the ranks that hold them, resumed without losing or repeating a sample.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use candle_core::{Device, Tensor};
use shardwise::checkpoint;
use shardwise::data::{Batches, Dataset, SampleOrder, TokenSequences};
use shardwise::prelude::*;

/// A dataset in which sample `i` is the number `i`; counts the loaded samples.
#[derive(Debug, Clone)]
struct Numbers {
    count: usize,
    loaded: Arc<AtomicUsize>,
}

impl Numbers {
    fn new(count: usize) -> Self {
        Numbers { count, loaded: Arc::default() }
    }
}

impl Dataset for Numbers {
    fn len(&self) -> usize {
        self.count
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        self.loaded.fetch_add(1, SeqCst);
        Ok(vec![Tensor::new(index as i64, &Device::Cpu)?])
    }
}

/// The samples of the next batches, drawn on a mesh and sharded over its axis `dp`.
fn drawn<D: Dataset>(batches: &mut Batches<D>, count: usize) -> Result<Vec<i64>> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.extend(batches.next_batch()?[0].full_tensor()?.to_vec1::<i64>()?);
    }
    Ok(all)
}

fn meshes() -> [(usize, Vec<(&'static str, usize)>); 4] {
    [(1, vec![("dp", 1)]), (2, vec![("dp", 2)]), (3, vec![("dp", 3)]), (4, vec![("dp", 2), ("tp", 2)])]
}

#[test]
fn batches_are_the_same_on_every_mesh() {
    for (seed, batch) in [(None, 4), (Some(7), 4), (Some(7), 5), (Some(9), 1)] {
        let order = SampleOrder::new(11).unwrap();
        let order = seed.map_or(order.clone(), |seed| order.shuffled(seed));
        let expected: Vec<i64> = (0..6 * batch as u64).map(|number| order.sample(number) as i64).collect();
        for (ranks, axes) in meshes() {
            let expected = expected.clone();
            launch(ranks, move |world| {
                let mesh = world.mesh(axes.clone())?;
                let batches = Batches::new(Numbers::new(11), &mesh)?.batch(batch).sharded("dp")?;
                let mut batches = match seed {
                    Some(seed) => batches.shuffle(seed),
                    None => batches,
                };
                world.trace().clear();
                let one = batches.clone().next_batch()?;
                assert!(world.trace().records().is_empty(), "drawing communicates nothing");
                assert_eq!((one[0].shape(), &one[0].placements()[0]), (&[batch][..], &Shard(0)));
                assert_eq!(drawn(&mut batches, 6)?, expected);
                assert_eq!((batches.position(), batches.epoch()), (6 * batch as u64, 6 * batch as u64 / 11));
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn a_rank_loads_only_its_samples() {
    launch(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let numbers = Numbers::new(100);
        let mut batches = Batches::new(numbers.clone(), &mesh)?.batch(8).sharded("dp")?;
        batches.next_batch()?;
        assert_eq!(numbers.loaded.load(SeqCst), 4);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_run_resumed_on_another_mesh_continues_with_the_next_sample() {
    let directory = Directory::new("resume");
    let saved = directory.0.clone();
    let before = launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let mut batches = Batches::new(Numbers::new(17), &mesh)?.shuffle(3).batch(4).sharded("dp")?;
        let drawn = drawn(&mut batches, 3)?;
        checkpoint::save_from(&world, &saved, (&batches,))?;
        Ok(drawn)
    })
    .unwrap();
    for (ranks, axes) in meshes() {
        let saved = directory.0.clone();
        let after = launch(ranks, move |world| {
            let mesh = world.mesh(axes.clone())?;
            let mut batches = Batches::new(Numbers::new(17), &mesh)?.shuffle(3).batch(5).sharded("dp")?;
            checkpoint::load_into(&world, &saved, (&mut batches,))?;
            drawn(&mut batches, 1)
        })
        .unwrap();
        // 12 samples, then 5: the first epoch, each once
        let mut epoch = [before.clone(), after].concat();
        epoch.sort_unstable();
        assert_eq!(epoch, (0..17).collect::<Vec<_>>());
    }
}

#[test]
fn a_position_in_another_dataset_is_rejected_without_changes() {
    let directory = Directory::new("refused");
    let path = directory.0.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let batches =
            |samples, seed| Ok::<_, Error>(Batches::new(Numbers::new(samples), &mesh)?.shuffle(seed).batch(2));
        let mut first = batches(10, 1)?;
        first.next_batch()?;
        checkpoint::save_from(&world, &path, (&first,))?;
        for (samples, seed, named) in [(11, 1, "samples 10"), (10, 2, "seed 1")] {
            let mut other = batches(samples, seed)?;
            let error = checkpoint::load_into(&world, &path, (&mut other,)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
            assert_eq!(other.position(), 0);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn invalid_data_is_rejected() {
    struct Uneven;
    impl Dataset for Uneven {
        fn len(&self) -> usize {
            4
        }

        fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
            Ok(vec![Tensor::zeros(index, DType::F32, &Device::Cpu)?])
        }
    }
    assert!(TokenSequences::new(vec![1, 2, 3], 3).unwrap_err().to_string().contains("3 token(s)"));
    assert!(TokenSequences::new(vec![1, 2, 3], 0).is_err());
    launch(1, |world| {
        let mesh = world.mesh([("dp", 1)])?;
        assert!(Batches::new(Numbers::new(0), &mesh).unwrap_err().to_string().contains("no samples"));
        assert!(Batches::new(Numbers::new(1), &mesh)?.sharded("pd").unwrap_err().to_string().contains("pd"));
        let mut batches = Batches::new(Uneven, &mesh)?.batch(2);
        let error = batches.next_batch().unwrap_err().to_string();
        assert!(error.contains("[f32 [0]] and [f32 [1]]"), "{error}");
        assert_eq!(batches.position(), 0);
        Ok(())
    })
    .unwrap();
}

/// A temporary directory, deleted when dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        Directory(std::env::temp_dir().join(format!("shardwise-data-{name}-{}", std::process::id())))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
