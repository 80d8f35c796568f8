//! Random meshes, shapes, placements and shard orders against a reference implementation with explicit index lists.
//!
//! `SHARDWISE_LAYOUT_CASES` sets the number of cases (default 3000), `SHARDWISE_SEED` the first seed.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use shardwise::{Layout, Mesh, Placement, ReduceOp};
use shardwise_test_suites::settings::env_or;

#[test]
fn every_rank_owns_what_the_definition_says_and_the_boxes_tile_the_tensor() {
    for_each_seed(|rng| {
        let case = random_case(rng, true);
        let layout = case.layout();
        check_ownership(&case, &layout);
        check_tiling(&layout);
        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout, "{json}");
    });
}

#[test]
fn shard_order_and_strided_shards_convert_into_each_other() {
    let mut converted = 0;
    for_each_seed(|rng| {
        let mut case = random_case(rng, false);
        let divides = rng.random_bool(0.5);
        if divides {
            for (dim, axes) in case.order.iter().enumerate() {
                let count: usize = axes.iter().map(|&a| case.mesh.shape()[a]).product();
                case.shape[dim] = count * rng.random_range(0..4);
            }
        }
        let ordered = case.layout();
        match ordered.to_strided() {
            Ok(strided) => {
                assert!(strided.has_default_order(), "{strided}");
                assert_eq!(strided.to_shard_order().unwrap(), ordered, "{strided}");
                assert_eq!(all_indices(&strided), all_indices(&ordered), "{strided} is not {ordered}");
                converted += usize::from(strided != ordered);
            }
            Err(error) => {
                assert!(!divides, "{ordered}: {error}");
                assert!(error.to_string().contains("own different elements"), "{error}");
            }
        }
    });
    assert!(converted > 0, "no case had a strided form");
}

fn for_each_seed(mut body: impl FnMut(&mut StdRng)) {
    let (cases, first) = (env_or("SHARDWISE_LAYOUT_CASES", 3000u64), env_or("SHARDWISE_SEED", 0u64));
    for seed in first..first + cases {
        let run = std::panic::AssertUnwindSafe(|| body(&mut StdRng::seed_from_u64(seed)));
        if let Err(payload) = std::panic::catch_unwind(run) {
            eprintln!("failed with SHARDWISE_SEED={seed}");
            std::panic::resume_unwind(payload);
        }
    }
}

struct Case {
    mesh: Mesh,
    shape: Vec<usize>,
    placements: Vec<Placement>,
    /// Per tensor dimension the mesh axes that shard it, in order.
    order: Vec<Vec<usize>>,
}

impl Case {
    fn layout(&self) -> Layout {
        let names: Vec<Vec<&str>> =
            self.order.iter().map(|axes| axes.iter().map(|&a| self.mesh.axes()[a].name.as_str()).collect()).collect();
        let order: Vec<(usize, &[&str])> = names.iter().enumerate().map(|(d, n)| (d, n.as_slice())).collect();
        Layout::with_shard_order(&self.mesh, self.shape.as_slice(), self.placements.clone(), &order)
            .unwrap_or_else(|e| panic!("{:?} {:?}: {e}", self.shape, self.placements))
    }

    /// Global indices along `dim` at a coordinate, by explicit lists.
    fn indices(&self, dim: usize, coordinate: &[usize], axes: &[usize]) -> Vec<usize> {
        let mut list: Vec<usize> = (0..self.shape[dim]).collect();
        let mut outer = 0;
        for &axis in axes {
            let (k, i) = (self.mesh.shape()[axis], coordinate[axis]);
            list = match &self.placements[axis] {
                Placement::Shard(_) => chunks(&list, k)[i].clone(),
                Placement::StridedShard { split_factor, .. } => {
                    chunks(&list, *split_factor).iter().flat_map(|group| chunks(group, k)[i].clone()).collect()
                }
                Placement::Ragged { sizes, .. } => {
                    let row = if sizes.len() == k { &sizes[..] } else { &sizes[outer * k..outer * k + k] };
                    let start: usize = row[..i].iter().sum();
                    list[start..start + row[i]].to_vec()
                }
                Placement::BlockCyclic { block, .. } => {
                    list.chunks(*block).skip(i).step_by(k).flatten().copied().collect()
                }
                other => panic!("{other} shards nothing"),
            };
            outer = outer * k + i;
        }
        list
    }
}

/// `list` in `k` chunks of ceil(n / k), as many as needed of them empty.
fn chunks(list: &[usize], k: usize) -> Vec<Vec<usize>> {
    let mut chunks: Vec<Vec<usize>> = list.chunks(list.len().div_ceil(k).max(1)).map(<[usize]>::to_vec).collect();
    chunks.resize(k, Vec::new());
    chunks
}

fn random_case(rng: &mut StdRng, ragged_and_strided: bool) -> Case {
    let axes: Vec<(String, usize)> = (0..rng.random_range(1..=4))
        .map(|a| (format!("m{a}"), *[1, 2, 2, 3, 4].get(rng.random_range(0..5)).unwrap()))
        .collect();
    let count: usize = axes.iter().map(|a| a.1).product();
    let mut ranks: Vec<usize> = (0..count + rng.random_range(0..3)).collect();
    if rng.random_bool(0.5) {
        ranks.shuffle(rng);
    }
    ranks.truncate(count);
    let mesh = Mesh::from_ranks(axes, ranks).unwrap();
    let ndim = rng.random_range(0..=3);
    let mut case = Case {
        shape: (0..ndim).map(|_| *[0, 1, 2, 3, 5, 7, 8, 12].get(rng.random_range(0..8)).unwrap()).collect(),
        placements: vec![Placement::Replicate; mesh.ndim()],
        order: vec![Vec::new(); ndim],
        mesh,
    };
    let mut axes: Vec<usize> = (0..case.mesh.ndim()).collect();
    axes.shuffle(rng);
    for axis in axes {
        if ndim == 0 || rng.random_bool(0.25) {
            case.placements[axis] = match rng.random_range(0..3) {
                0 => Placement::Partial(ReduceOp::ALL[rng.random_range(0..8)]),
                _ => Placement::Replicate,
            };
            continue;
        }
        let dim = rng.random_range(0..ndim);
        case.placements[axis] = match rng.random_range(0..if ragged_and_strided { 5 } else { 1 }) {
            1 => Placement::StridedShard { dim: dim as isize, split_factor: rng.random_range(1..5) },
            2 => random_ragged(rng, &case, dim, axis),
            3 => Placement::block_cyclic(dim as isize, rng.random_range(1..5)),
            _ => Placement::Shard(dim as isize),
        };
        case.order[dim].push(axis);
    }
    case
}

/// Sizes that fit what the axes so far have left of `dim`, for every combination of their coordinates.
fn random_ragged(rng: &mut StdRng, case: &Case, dim: usize, axis: usize) -> Placement {
    let (k, axes) = (case.mesh.shape()[axis], &case.order[dim]);
    let combinations: usize = axes.iter().map(|&a| case.mesh.shape()[a]).product();
    let mut sizes = Vec::new();
    for outer in 0..combinations {
        let mut coordinate = vec![0; case.mesh.ndim()];
        let mut rest = outer;
        for &a in axes.iter().rev() {
            coordinate[a] = rest % case.mesh.shape()[a];
            rest /= case.mesh.shape()[a];
        }
        let n = case.indices(dim, &coordinate, axes).len();
        let mut bounds: Vec<usize> = (1..k).map(|_| rng.random_range(0..=n)).collect();
        bounds.extend([0, n]);
        bounds.sort_unstable();
        sizes.extend(bounds.windows(2).map(|w| w[1] - w[0]));
    }
    Placement::ragged(dim as isize, sizes)
}

fn check_ownership(case: &Case, layout: &Layout) {
    for &rank in case.mesh.ranks() {
        let coordinate = case.mesh.coordinate(rank).unwrap();
        for dim in 0..case.shape.len() {
            let expected = case.indices(dim, &coordinate, &case.order[dim]);
            assert_eq!(layout.global_indices(rank, dim), expected, "dim {dim} of rank {rank} in {layout}");
            assert_eq!(layout.local_shape(rank)[dim], expected.len(), "{layout}");
            let offset = expected.first().copied().unwrap_or(case.shape[dim]);
            assert_eq!(layout.global_offset(rank)[dim], offset, "{layout}");
        }
    }
}

fn check_tiling(layout: &Layout) {
    let shape = layout.shape();
    let volume: usize = shape.iter().product();
    let flat = |index: &[usize]| index.iter().zip(shape).fold(0, |f, (i, n)| f * n + i);
    let cells = |offsets: &[usize], sizes: &[usize]| {
        let mut all = vec![Vec::new()];
        for (&o, &s) in offsets.iter().zip(sizes) {
            all = all.iter().flat_map(|p: &Vec<usize>| (o..o + s).map(|i| [p.as_slice(), &[i]].concat())).collect();
        }
        all
    };
    let mut owners = vec![0; volume];
    for owned in layout.primary_boxes() {
        assert!(owned.global.volume() > 0, "{layout}");
        for cell in cells(&owned.global.offsets, &owned.global.sizes) {
            owners[flat(&cell)] += 1;
        }
    }
    assert!(owners.iter().all(|&n| n == 1), "the boxes of {layout} do not tile it: {owners:?}");
    // What a rank's boxes say of its local tensor agrees with its indices, and every element is somewhere.
    for &rank in layout.mesh().ranks() {
        let indices: Vec<Vec<usize>> = (0..shape.len()).map(|dim| layout.global_indices(rank, dim)).collect();
        let mut held = 0;
        for owned in layout.boxes_of(rank) {
            assert_eq!(owned.rank, rank);
            held += owned.global.volume();
            for dim in 0..shape.len() {
                let run = &indices[dim][owned.local_offsets[dim]..][..owned.global.sizes[dim]];
                assert!(
                    run.iter()
                        .copied()
                        .eq(owned.global.offsets[dim]..owned.global.offsets[dim] + owned.global.sizes[dim])
                );
            }
        }
        assert_eq!(held, layout.local_shape(rank).iter().product::<usize>(), "{layout}");
    }
    assert_eq!(layout.boxes().count(), layout.mesh().ranks().iter().map(|&r| layout.boxes_of(r).len()).sum::<usize>());
}

fn all_indices(layout: &Layout) -> Vec<Vec<Vec<usize>>> {
    let of = |rank: &usize| (0..layout.shape().len()).map(|dim| layout.global_indices(*rank, dim)).collect();
    layout.mesh().ranks().iter().map(of).collect()
}
