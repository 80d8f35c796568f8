//! The model of these tests, its meshes and helpers.

use std::sync::Arc;

use candle_core::Tensor;
use shardwise::checkpoint_activations;
use shardwise::nn::{Hooks, LayerNorm, Linear};
use shardwise::plan::{DataParallel, FullyShard, ShardingPlanner, TensorParallel, shard_module};
use shardwise::prelude::*;

/// Rows of a batch: so many that moving activations costs more than moving weights.
pub(crate) const ROWS: usize = 128;

/// A residual block.
#[derive(Module)]
pub(crate) struct Block {
    pub(crate) norm: LayerNorm,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) hooks: Hooks,
}

impl Forward for Block {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let inner = self.up.forward(&self.norm.forward(x)?)?.tanh()?;
            x.add(&self.down.forward(&inner)?)
        })
    }
}

/// Linear layers around residual blocks; 6 inputs, 3 outputs.
#[derive(Module)]
pub(crate) struct Net {
    pub(crate) first: Linear,
    pub(crate) blocks: Vec<Arc<Block>>,
    pub(crate) head: Linear,
}

impl Net {
    pub(crate) fn new(builder: &Builder, width: usize, blocks: usize) -> Result<Self> {
        let block = |i: usize| -> Result<Arc<Block>> {
            let at = builder.child("blocks").child(&i.to_string());
            Ok(Arc::new(Block {
                norm: LayerNorm::new(&at.child("norm"), width, 1e-5)?,
                up: Linear::new(&at.child("up"), width, 2 * width)?,
                down: Linear::new(&at.child("down"), 2 * width, width)?,
                hooks: at.hooks(),
            }))
        };
        Ok(Net {
            first: Linear::new(&builder.child("first"), 6, width)?,
            blocks: (0..blocks).map(block).collect::<Result<_>>()?,
            head: Linear::new(&builder.child("head"), width, 3)?,
        })
    }

    pub(crate) fn features(&self, x: &DTensor, recompute: bool) -> Result<DTensor> {
        let mut x = self.first.forward(x)?;
        for block in &self.blocks {
            x = match recompute {
                false => block.forward(&x)?,
                true => {
                    let block = Arc::clone(block);
                    checkpoint_activations(&[&x], move |x| Ok(vec![block.forward(&x[0])?]))?.swap_remove(0)
                }
            };
        }
        Ok(x)
    }

    /// Mean squared distance of the outputs from `target`, in the type of the target.
    pub(crate) fn loss(&self, x: &DTensor, target: &DTensor, recompute: bool) -> Result<DTensor> {
        let y = self.head.forward(&self.features(x, recompute)?)?;
        y.to_dtype(target.dtype())?.sub(target)?.square()?.mean_all()
    }
}

/// Inputs and targets of step `step`, sharded on the batch as `placements` say.
pub(crate) fn batch(
    mesh: &DeviceMesh,
    placements: &[Placement],
    dtype: DType,
    step: usize,
) -> Result<(DTensor, DTensor)> {
    let value = move |i: &[usize], salt: usize| (((i[0] * 7 + i[1] * 3 + salt + step * 5) % 13) as f64 - 6.0) / 8.0;
    let x = DTensor::from_fn((ROWS, 6), dtype, mesh, placements.to_vec(), move |i| value(i, 1))?;
    let target = DTensor::from_fn((ROWS, 3), dtype, mesh, placements.to_vec(), move |i| value(i, 4))?;
    Ok((x, target))
}

/// A way to place a model on a mesh: name, mesh, the axes that replicate, the axes that shard, and whether the last one is `tp`.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) axes: &'static [(&'static str, usize)],
    pub(crate) replicate: &'static [&'static str],
    pub(crate) shard: &'static [&'static str],
}

pub(crate) const WAYS: [Way; 7] = [
    Way { name: "FSDP", axes: &[("dp", 4)], replicate: &[], shard: &["dp"] },
    Way { name: "DDP", axes: &[("dp", 4)], replicate: &["dp"], shard: &[] },
    Way { name: "HSDP", axes: &[("rep", 2), ("dp", 2)], replicate: &["rep"], shard: &["dp"] },
    Way { name: "FSDP over two axes", axes: &[("a", 2), ("b", 2)], replicate: &[], shard: &["a", "b"] },
    Way { name: "two replica axes", axes: &[("a", 2), ("b", 2)], replicate: &["a", "b"], shard: &[] },
    Way { name: "FSDP x TP", axes: &[("dp", 2), ("tp", 2)], replicate: &[], shard: &["dp"] },
    Way { name: "HSDP x TP", axes: &[("rep", 2), ("dp", 2), ("tp", 2)], replicate: &["rep"], shard: &["dp"] },
];

impl Way {
    pub(crate) fn ranks(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    pub(crate) fn mesh(&self, world: &World) -> Result<DeviceMesh> {
        world.mesh(self.axes.to_vec())
    }

    /// Placements of a batch: sharded over all axes but `tp`.
    pub(crate) fn batch(&self) -> Vec<Placement> {
        self.axes.iter().map(|(name, _)| if *name == "tp" { Replicate } else { Shard(0) }).collect()
    }

    /// Builds the model on one layout and shards it.
    pub(crate) fn build(&self, mesh: &DeviceMesh, width: usize, dtype: DType) -> Result<Net> {
        mesh.manual_seed(5);
        let net = Net::new(&Builder::new(mesh).dtype(dtype), width, 2)?;
        let plan = match self.axes.iter().any(|(name, _)| *name == "tp") {
            true => TensorParallel::new("tp").plan(&net, mesh)?,
            false => DataParallel::new(self.replicate).plan(&net, mesh)?,
        };
        let plan = if self.shard.is_empty() { plan } else { FullyShard::new(self.shard).extend(plan, &net, mesh)? };
        shard_module(&net, mesh, &plan)?;
        Ok(net)
    }
}

/// A mesh of this rank only.
pub(crate) fn alone(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

/// A model on this rank only.
pub(crate) fn reference(world: &World, width: usize, dtype: DType) -> Result<(DeviceMesh, Net)> {
    let mesh = alone(world)?;
    mesh.manual_seed(5);
    let net = Net::new(&Builder::new(&mesh).dtype(dtype), width, 2)?;
    Ok((mesh, net))
}

/// The collectives of a rank since its trace was cleared, without agreements.
pub(crate) fn calls(world: &World) -> Vec<&'static str> {
    world.trace().records().iter().map(|r| r.call).filter(|call| *call != "agree").collect()
}

pub(crate) fn count(world: &World, call: &str) -> usize {
    calls(world).iter().filter(|name| **name == call).count()
}

/// Bytes that this rank sent in calls of a kind.
pub(crate) fn bytes(world: &World, call: &str) -> usize {
    world.trace().records().iter().filter(|r| r.call == call).map(|r| r.bytes).sum()
}

pub(crate) fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The only element of a tensor. Collective.
pub(crate) fn value(tensor: &DTensor) -> Result<f64> {
    Ok(numbers(&tensor.detach().full_tensor()?)[0])
}

/// The largest difference between two tensors of one shape.
pub(crate) fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    numbers(a).iter().zip(numbers(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Fails unless all parameters of two models are within `tolerance`.
pub(crate) fn assert_same_parameters(net: &impl Module, other: &impl Module, tolerance: f64, what: &str) -> Result<()> {
    for ((name, a), (_, b)) in net.named_parameters().into_iter().zip(other.named_parameters()) {
        let found = distance(&a.get().full_tensor()?, &b.get().full_tensor()?);
        assert!(found <= tolerance, "{what}, {name}: {found}");
    }
    Ok(())
}

/// Fails unless the gradients of two models are within `tolerance`.
pub(crate) fn assert_same_gradients(
    (net, found): (&impl Module, &Gradients),
    (other, expected): (&impl Module, &Gradients),
    tolerance: f64,
    what: &str,
) -> Result<()> {
    for ((name, a), (_, b)) in net.named_parameters().into_iter().zip(other.named_parameters()) {
        let (a, b) = (found.get(&a.get())?.full_tensor()?, expected.get(&b.get())?.full_tensor()?);
        let found = distance(&a, &b);
        assert!(found <= tolerance, "{what}, {name}: {found}");
    }
    Ok(())
}
