//! The most common tasks, next to the same in PyTorch.
//!
//! Each section has PyTorch's code first and ours after it. All of ours is compiled and run by the tests, on 4 ranks; what a
//! section needs from the ones before it (`world`, a `mesh` of `dp=2` and `tp=2`, a model, tensors) is left out on both sides, and so are
//! imports and the start of processes. `use shardwise::prelude::*;` brings most names.
//!
//! | task | PyTorch, lines | Shardwise, lines |
//! |---|---|---|
//! | A mesh | 2 | 2 |
//! | From a plain tensor | 2 | 2 |
//! | Distribute | 2 | 2 |
//! | Matrix product | 1 | 1 |
//! | Slices and masks | 3 | 3 |
//! | Gradients | 4 | 4 |
//! | Redistribute | 3 | 3 |
//! | Local code with gradients | 3 | 3 |
//! | Local map | 7 | 1 |
//! | Random numbers | 2 | 2 |
//! | A tensor-parallel MLP | 2 | 2 |
//! | Fully sharded parameters | 3 | 1 |
//! | Loss with sharded classes | 3 | 2 |
//! | Clip gradients | 2 | 2 |
//! | A training loop | 6 | 5 |
//! | Save | 2 | 1 |
//! | Load in another layout | 4 | 1 |
//! | Resume the newest checkpoint | 5 | 2 |
//! | Load other names | 2 | 2 |
//! | Convert a checkpoint | 3 | 1 |
//! | A custom operator | 14 | 2 |
//! | A dry run | 8 | 6 |
//! | A sharded tensor | 3 | 3 |
//! | all | 86 | 53 |
//!
//! Lines without blank ones; a closing brace is a line.
//!
//! # A mesh
//!
//! ```python
//! mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
//! tp = mesh["tp"]
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! let tp = mesh.slice(["tp"])?;
//! # assert_eq!(tp.size(), 2);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # From a plain tensor
//!
//! Shards of any sizes fit; ranks exchange their sizes.
//!
//! ```python
//! local = torch.full((2, 4), float(rank))
//! x = DTensor.from_local(local, mesh, [Shard(0), Replicate()])
//! ```
//!
//! ```
//! use shardwise::candle_core::{Device, Tensor};
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! let local = Tensor::full(1f32, (2, 4), &Device::Cpu)?;
//! let x = DTensor::from_local(&local, &mesh, [Shard(0), Replicate])?;
//! # assert_eq!(x.shape(), [4, 4]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Distribute
//!
//! ```python
//! whole = torch.arange(24.0).reshape(4, 6)
//! x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
//! ```
//!
//! ```
//! use shardwise::candle_core::{Device, Tensor};
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! let whole = Tensor::arange(0f32, 24.0, &Device::Cpu)?.reshape((4, 6))?;
//! let x = DTensor::distribute_tensor(&whole, &mesh, [Shard(0), Shard(1)], Some(0))?;
//! # assert_eq!(x.local_shape(), [2, 3]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Matrix product
//!
//! ```python
//! y = F.gelu(x @ w * 0.5 + 1.0)
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0), Replicate])?;
//! # let w = DTensor::ones((8, 6), DType::F32, &mesh, [Replicate, Shard(1)])?;
//! let y = ((x.matmul(&w)? * 0.5)? + 1.0)?.gelu()?;
//! # assert_eq!(y.placements(), [Shard(0), Shard(1)]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Slices and masks
//!
//! In PyTorch a write to a dimension that is sharded is lost; here it reaches the rank that holds the elements.
//!
//! ```python
//! part = x[:, 1:3]
//! positive = x[x > 0]
//! x[0, :] = 0.0
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let mut x = DTensor::randn((4, 6), &mesh, [Shard(0), Replicate])?;
//! let part = x.i((.., 1..3))?;
//! let positive = x.i(&x.gt(0.0)?)?;
//! x.set(0, 0.0)?;
//! # assert_eq!((part.shape(), positive.ndim()), (&[4, 2][..], 1));
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Gradients
//!
//! ```python
//! w.requires_grad_()
//! loss = (x @ w).square().mean()
//! loss.backward()
//! gradient = w.grad
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0), Replicate])?;
//! # let w = DTensor::ones((8, 6), DType::F32, &mesh, [Replicate, Shard(1)])?;
//! let w = w.requires_grad();
//! let loss = x.matmul(&w)?.square()?.mean_all()?;
//! let grads = loss.backward()?;
//! let gradient = grads.get(&w)?;
//! # assert_eq!(gradient.shape(), [8, 6]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Redistribute
//!
//! ```python
//! y = x.redistribute(placements=[Replicate(), Shard(1)])
//! assert y.placements == (Replicate(), Shard(1))
//! whole = y.full_tensor()
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0), Replicate])?;
//! let y = x.redistribute([Replicate, Shard(1)])?;
//! let y = y.expect("dp=R,tp=S(1)")?;
//! let whole = y.full_tensor()?;
//! # assert_eq!(whole.dims(), [4, 8]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Local code with gradients
//!
//! ```python
//! local = x.to_local()?
//! y = DTensor.from_local(local.relu(), mesh, x.placements)
//! y.sum().backward()
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let x = DTensor::randn((4, 8), &mesh, [Shard(0), Replicate])?.requires_grad();
//! let local = x.to_local()?;
//! let y = DTensor::from_local(&local.relu()?, &mesh, x.placements().to_vec())?;
//! let grads = y.sum_all()?.backward()?;
//! # assert_eq!(grads.get(&x)?.shape(), [4, 8]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Local map
//!
//! ```python
//! scaled = local_map(
//!     lambda x, s: x * x * s,
//!     out_placements=[Shard(0), Replicate()],
//!     in_placements=([Shard(0), Replicate()], [Replicate(), Replicate()]),
//!     device_mesh=mesh,
//! )
//! y = scaled(x, s)
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::local_map;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let x = DTensor::randn((4, 8), &mesh, [Shard(0), Replicate])?;
//! # let s = DTensor::ones(8, DType::F32, &mesh, [Replicate, Replicate])?;
//! let y = local_map(&[&x, &s], [Shard(0), Replicate], &[], |x| x[0].sqr()?.broadcast_mul(&x[1]))?;
//! # assert_eq!(y.shape(), [4, 8]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Random numbers
//!
//! The same numbers in every layout and on any number of ranks, also on CPUs.
//!
//! ```python
//! torch.manual_seed(7)
//! x = torch.distributed.tensor.randn(4, 6, device_mesh=mesh, placements=[Shard(0), Shard(1)])
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! mesh.manual_seed(7);
//! let x = DTensor::randn((4, 6), &mesh, [Shard(0), Shard(1)])?;
//! # assert_eq!(x.shape(), [4, 6]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # A tensor-parallel MLP
//!
//! A model with named fields is a struct with `#[derive(Module)]`, see [`nn`](crate::nn).
//!
//! ```python
//! model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
//! parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::{Gelu, Linear, Sequential};
//! # use shardwise::plan::{ColwiseParallel, RowwiseParallel, parallelize_module};
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let builder = Builder::new(&mesh);
//! let model = Sequential::new(&builder).build(|b| Linear::new(b, 16, 64))?.add(Gelu::new()).build(|b| Linear::new(b, 64, 16))?;
//! parallelize_module(&model, &mesh, &[("0", &ColwiseParallel::new("tp")), ("2", &RowwiseParallel::new("tp"))])?;
//! # assert_eq!(model.named_parameters()[0].1.get().local_shape(), [32, 16]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Fully sharded parameters
//!
//! ```python
//! for block in model.blocks:
//!     fully_shard(block, mesh=mesh["dp"])
//! fully_shard(model, mesh=mesh["dp"])
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::Linear;
//! # use shardwise::plan::fully_shard;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let model = Linear::new(&Builder::new(&mesh), 16, 8)?;
//! fully_shard(&model, &mesh, &["dp"])?;
//! # assert_eq!(model.weight.get().local_elem_count(), 64);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Loss with sharded classes
//!
//! No scope is needed: ranks that share the classes all-reduce one number per prediction.
//!
//! ```python
//! with loss_parallel():
//!     loss = F.cross_entropy(logits, targets)
//!     loss.backward()
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::ops::LossOptions;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let logits = DTensor::randn((8, 10), &mesh, [Shard(0), Shard(1)])?.requires_grad();
//! # let targets = DTensor::zeros(8, DType::I64, &mesh, [Shard(0), Replicate])?;
//! let loss = logits.cross_entropy(&targets, LossOptions::default())?;
//! let grads = loss.backward()?;
//! # assert_eq!(grads.get(&logits)?.shape(), [8, 10]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Clip gradients
//!
//! ```python
//! loss.backward()
//! norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::Linear;
//! # use shardwise::optim::clip_grad_norm;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let model = Linear::new(&Builder::new(&mesh), 16, 8)?;
//! # let loss = model.forward(&DTensor::ones((4, 16), DType::F32, &mesh, [Shard(0), Replicate])?)?.square()?.sum_all()?;
//! let grads = loss.backward()?;
//! let (grads, norm) = clip_grad_norm(grads, [&model.weight], 1.0, 2.0)?;
//! # assert!(norm > 0.0 && grads.len() == 2);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # A training loop
//!
//! ```python
//! optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
//! for step in range(10):
//!     loss = (model(x) - y).square().mean()
//!     optimizer.zero_grad()
//!     loss.backward()
//!     optimizer.step()
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::Linear;
//! # use shardwise::optim::ParamGroup;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let model = Linear::new(&Builder::new(&mesh), 16, 8)?;
//! # let x = DTensor::randn((4, 16), &mesh, [Shard(0), Replicate])?;
//! # let y = DTensor::zeros((4, 8), DType::F32, &mesh, [Shard(0), Replicate])?;
//! let mut optimizer = ParamGroup::new(AdamW::default()).with_lr(1e-3).over(&model)?;
//! for _ in 0..10 {
//!     let loss = (model.forward(&x)? - &y)?.square()?.mean_all()?;
//!     optimizer.step(loss.backward()?)?;
//! }
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Save
//!
//! ```python
//! state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
//! dcp.save(state, checkpoint_id=path)
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::Linear;
//! # use shardwise::checkpoint;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let path = std::env::temp_dir().join(format!("shardwise-guide-save-{}", std::process::id()));
//! # let model = Linear::new(&Builder::new(&mesh), 16, 8)?;
//! # let optimizer = AdamW::default().over(&model)?;
//! checkpoint::save_from(&world, &path, (&model, &optimizer, &mesh))?;
//! # world.barrier()?;
//! # if world.rank() == 0 { std::fs::remove_dir_all(&path)?; }
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Load in another layout
//!
//! ```python
//! model_state, optimizer_state = get_state_dict(model, optimizer)
//! state = {"model": model_state, "optimizer": optimizer_state}
//! dcp.load(state, checkpoint_id=path)
//! set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::Linear;
//! # use shardwise::checkpoint;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let path = std::env::temp_dir().join(format!("shardwise-guide-load-{}", std::process::id()));
//! # let model = Linear::new(&Builder::new(&mesh), 16, 8)?;
//! # let mut optimizer = AdamW::default().over(&model)?;
//! # checkpoint::save_from(&world, &path, (&model, &optimizer, &mesh))?;
//! checkpoint::load_into(&world, &path, (&model, &mut optimizer, &mesh))?;
//! # world.barrier()?;
//! # if world.rank() == 0 { std::fs::remove_dir_all(&path)?; }
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Resume the newest checkpoint
//!
//! One that is damaged is passed over, and all ranks restore the same step.
//!
//! ```python
//! steps = sorted(int(p.name.removeprefix("step-")) for p in Path(root).glob("step-*"))
//! start = 0
//! if steps:
//!     dcp.load(state, checkpoint_id=f"{root}/step-{steps[-1]:08}")
//!     start = steps[-1]
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::Linear;
//! # use shardwise::checkpoint;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let root = std::env::temp_dir().join(format!("shardwise-guide-resume-{}", std::process::id()));
//! # let model = Linear::new(&Builder::new(&mesh), 16, 8)?;
//! # let mut optimizer = AdamW::default().over(&model)?;
//! let resumed = checkpoint::resume(&world, &root, (&model, &mut optimizer, &mesh))?;
//! let start = resumed.map_or(0, |resumed| resumed.step);
//! # assert_eq!(start, 0);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Load other names
//!
//! Also from a checkpoint, with `checkpoint::ModelPart`.
//!
//! ```python
//! state = {name.removeprefix("module."): value for name, value in state.items()}
//! missing, unexpected = model.load_state_dict(state, strict=False)
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::nn::{Linear, IncompatibleKeys, StateDictOptions};
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let model = Linear::new(&Builder::new(&mesh), 16, 8)?;
//! # let state = std::collections::BTreeMap::from([("module.weight".to_string(), model.weight.get())]);
//! let options = StateDictOptions { strict: false, prefix: "module.".into(), ..StateDictOptions::default() };
//! let IncompatibleKeys { missing_keys, unexpected_keys } = model.load_state_dict_with(&state, &options)?;
//! # assert_eq!((missing_keys.len(), unexpected_keys.len()), (1, 0));
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # Convert a checkpoint
//!
//! Tensor by tensor, so that a checkpoint larger than memory can be converted.
//!
//! ```python
//! dcp_to_torch_save(source, "model.pt")
//! state = torch.load("model.pt", weights_only=False)
//! save_file({k: v.contiguous() for k, v in state["model"].items()}, "model.safetensors")
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::checkpoint;
//! # use shardwise::checkpoint::{ConvertOptions, Format, State, convert};
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let directory = std::env::temp_dir().join(format!("shardwise-guide-convert-{}-{}", std::process::id(), world.rank()));
//! # let (source, target) = (directory.join("a"), directory.join("b"));
//! # let single = DTensor::ones((4, 2), DType::F32, &mesh, [Replicate, Replicate])?;
//! # let source = std::env::temp_dir().join(format!("shardwise-guide-source-{}", std::process::id()));
//! # checkpoint::save(&world, &source, &State::map([("weight", single)]))?;
//! convert(&source, &target, &ConvertOptions::to(Format::HuggingFace), &|_| {})?;
//! # world.barrier()?;
//! # std::fs::remove_dir_all(&directory)?;
//! # if world.rank() == 0 { std::fs::remove_dir_all(&source)?; }
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # A custom operator
//!
//! An elementwise one; any other implements [`Op`](crate::op::Op) with rule, kernel and gradient. Second derivatives work.
//!
//! ```python
//! @torch.library.custom_op("my::cube", mutates_args=())
//! def cube(x: torch.Tensor) -> torch.Tensor:
//!     return x ** 3
//!
//! @cube.register_fake
//! def _(x):
//!     return torch.empty_like(x)
//!
//! cube.register_autograd(
//!     lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
//!     setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
//! )
//!
//! @register_sharding(torch.ops.my.cube.default)
//! def _(x):
//!     return [([Replicate()], [Replicate()])] + [([Shard(d)], [Shard(d)]) for d in range(x.ndim)]
//!
//! y = torch.ops.my.cube(x)
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::ops::ElementwiseOp;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! # let x = DTensor::ones((4, 6), DType::F32, &mesh, [Shard(0), Shard(1)])?;
//! const CUBE: ElementwiseOp = ElementwiseOp::new("cube", |x| x.powf(3.0), |x| x.square()? * 3.0);
//! let y = CUBE.apply(&x)?;
//! # assert_eq!(y.placements(), [Shard(0), Shard(1)]);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # A dry run
//!
//! With bytes per collective and peak memory. [`report_step`](crate::models::report_step) and `shardwise plan` describe a whole
//! training step in this way; [`picture`](crate::picture) draws layouts, and `docs/pictures.md` has one of every kind.
//!
//! ```python
//! with FakeTensorMode():
//!     store = FakeStore()
//!     dist.init_process_group("fake", rank=0, world_size=1024, store=store)
//!     mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("dp", "tp"))
//!     w = torch.distributed.tensor.zeros(8192, 8192, device_mesh=mesh, placements=[Shard(0), Shard(1)])
//!     with CommDebugMode() as comm:
//!         w.redistribute(placements=[Replicate(), Shard(1)])
//!     print(comm.get_comm_counts())
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::DryWorld;
//! # launch(4, |world| {
//! # let _ = world;
//! let run = DryWorld::new(1024)?.run(|world| {
//!     let mesh = world.mesh([("dp", 128), ("tp", 8)])?;
//!     let w = DTensor::zeros((8192, 8192), DType::F32, &mesh, [Shard(0), Shard(1)])?;
//!     w.redistribute([Replicate, Shard(1)])
//! })?;
//! println!("{} collectives, {} bytes at most", run.records.len(), run.peak_bytes);
//! # assert_eq!(run.records.len(), 1);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # A sharded tensor
//!
//! ```python
//! spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:2/cpu", "rank:3/cpu"])
//! x = sharded_tensor.zeros(spec, 8, 4)
//! x.reshard(ChunkShardingSpec(dim=1, placements=spec.placements))
//! ```
//!
//! ```
//! # use shardwise::prelude::*;
//! # use shardwise::ShardedTensor;
//! # use shardwise::sharded::ChunkShardingSpec;
//! # launch(4, |world| {
//! # let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//! let rows = ChunkShardingSpec::over_ranks(0, [0, 1, 2, 3])?;
//! let x = ShardedTensor::zeros(rows, (8, 4), DType::F32, &mesh)?;
//! let columns = x.reshard(ChunkShardingSpec::over_ranks(1, [0, 1, 2, 3])?)?;
//! # assert_eq!(columns.local_shards().len(), 1);
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
