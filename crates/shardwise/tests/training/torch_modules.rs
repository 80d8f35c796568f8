//! Modules with the state, inputs, outputs and gradients that PyTorch recorded (`scripts/record_modules.py`), with inputs and
//! parameters in several placements.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use serde_json::Value;
use shardwise::nn::*;
use shardwise::ops::{CtcOptions, EmbeddingBagMode, EmbeddingOptions, Interpolation, PerDim, Reduction};
use shardwise::prelude::*;

const RECORDED: &str = include_str!("../data/modules.jsonl");

/// Runs a module on its inputs.
type Run = Box<dyn Fn(&[DTensor]) -> Result<Vec<DTensor>>>;

/// A module and its call.
type Built = (std::rc::Rc<dyn Module>, Run);

/// The options of a recorded module.
struct Options<'a>(&'a Value);

impl Options<'_> {
    fn size(&self, name: &str) -> usize {
        self.0[name].as_u64().unwrap_or_else(|| panic!("{name} of {}", self.0)) as usize
    }

    fn dim(&self, name: &str) -> isize {
        self.0[name].as_i64().unwrap_or_else(|| panic!("{name} of {}", self.0)) as isize
    }

    fn number(&self, name: &str, default: f64) -> f64 {
        self.0[name].as_f64().unwrap_or(default)
    }

    fn flag(&self, name: &str, default: bool) -> bool {
        self.0[name].as_bool().unwrap_or(default)
    }

    fn list(&self, name: &str) -> Vec<f64> {
        match &self.0[name] {
            Value::Array(all) => all.iter().filter_map(Value::as_f64).collect(),
            one => one.as_f64().into_iter().collect(),
        }
    }

    fn per_dim(&self, name: &str) -> Option<PerDim> {
        let all: Vec<usize> = self.list(name).iter().map(|&n| n as usize).collect();
        match all[..] {
            [] => None,
            [one] => Some(one.into()),
            [a, b] => Some([a, b].into()),
            _ => Some([all[0], all[1], all[2]].into()),
        }
    }

    fn sizes(&self) -> Vec<usize> {
        self.list("sizes").iter().map(|&n| n as usize).collect()
    }

    /// PyTorch's list of borders as pairs.
    fn borders(&self) -> Vec<(isize, isize)> {
        self.list("padding").chunks(2).map(|pair| (pair[0] as isize, pair[1] as isize)).collect()
    }

    fn reduction(&self) -> Reduction {
        match self.0["reduction"].as_str() {
            Some("sum") => Reduction::Sum,
            Some("none") => Reduction::None,
            Some("batchmean") => Reduction::BatchMean,
            _ => Reduction::Mean,
        }
    }

    fn recurrent(&self) -> RecurrentOptions {
        let sizes = self.sizes();
        RecurrentOptions::new(sizes[0], sizes[1])
            .num_layers(self.0["num_layers"].as_u64().unwrap_or(1) as usize)
            .bias(self.flag("bias", true))
            .batch_first(self.flag("batch_first", false))
            .bidirectional(self.flag("bidirectional", false))
            .proj_size(self.0["proj_size"].as_u64().unwrap_or(0) as usize)
    }

    fn embedding(&self) -> EmbeddingOptions {
        EmbeddingOptions {
            padding_idx: self.0["padding_idx"].as_i64(),
            scale_grad_by_freq: self.flag("scale_grad_by_freq", false),
            ..EmbeddingOptions::default()
        }
    }
}

fn layer(layer: impl Layer + 'static) -> Result<Built> {
    let layer = std::rc::Rc::new(layer);
    let run = layer.clone();
    Ok((layer, Box::new(move |x| Ok(vec![run.forward(&x[0])?]))))
}

fn several(module: impl Module + ForwardAll + 'static) -> Result<Built> {
    let module = std::rc::Rc::new(module);
    let run = module.clone();
    Ok((module, Box::new(move |x| run.forward_all(&x.iter().collect::<Vec<_>>()))))
}

fn state_of(x: &[DTensor]) -> Option<RecurrentState> {
    x.get(1).map(|hidden| RecurrentState { hidden: hidden.clone(), cell: x.get(2).cloned() })
}

/// A recurrent layer or cell: its parameters, and the outputs that PyTorch returns.
macro_rules! recurrent {
    ($module:expr) => {{
        let module = std::rc::Rc::new($module);
        let run = module.clone();
        let call = move |x: &[DTensor]| {
            let (output, state) = run.forward_state(&x[0], state_of(x).as_ref())?;
            Ok([output, state.hidden].into_iter().chain(state.cell).collect())
        };
        Ok((module, Box::new(call)))
    }};
}

macro_rules! cell {
    ($module:expr) => {{
        let module = std::rc::Rc::new($module);
        let run = module.clone();
        let call = move |x: &[DTensor]| {
            let state = run.forward_state(&x[0], state_of(x).as_ref())?;
            Ok([state.hidden].into_iter().chain(state.cell).collect())
        };
        Ok((module, Box::new(call)))
    }};
}

/// A pool with the options that are recorded.
macro_rules! pool {
    ($o:ident, $pool:expr) => {{
        let mut pool = $pool.ceil_mode($o.flag("ceil_mode", false));
        if let Some(stride) = $o.per_dim("stride") {
            pool = pool.stride(stride);
        }
        if let Some(padding) = $o.per_dim("padding") {
            pool = pool.padding(padding);
        }
        pool
    }};
}

macro_rules! max_pool {
    ($o:ident, $Pool:ident) => {{
        let mut pool = pool!($o, $Pool::new($o.per_dim("kernel_size").unwrap()));
        if let Some(dilation) = $o.per_dim("dilation") {
            pool = pool.dilation(dilation);
        }
        layer(pool)
    }};
}

macro_rules! avg_pool {
    ($o:ident, $Pool:ident) => {{
        let pool = pool!($o, $Pool::new($o.per_dim("kernel_size").unwrap()));
        let pool = pool.count_include_pad($o.flag("count_include_pad", true));
        match $o.0["divisor_override"].as_i64() {
            Some(divisor) => layer(pool.divisor_override(divisor)),
            None => layer(pool),
        }
    }};
}

macro_rules! lp_pool {
    ($o:ident, $Pool:ident) => {{
        let pool = $Pool::new($o.number("norm_type", 2.0), $o.per_dim("kernel_size").unwrap());
        let pool = pool.ceil_mode($o.flag("ceil_mode", false));
        match $o.per_dim("stride") {
            Some(stride) => layer(pool.stride(stride)),
            None => layer(pool),
        }
    }};
}

macro_rules! unpool {
    ($o:ident, $Pool:ident) => {{
        let module = std::rc::Rc::new($Pool::new($o.per_dim("kernel_size").unwrap()));
        let run = module.clone();
        let call = move |x: &[DTensor]| Ok(vec![run.forward_indices(&x[0], &x[1], None)?]);
        Ok((module, Box::new(call)))
    }};
}

macro_rules! columns {
    ($o:ident, $module:expr) => {{
        let mut module = $module;
        if let Some(padding) = $o.per_dim("padding") {
            module = module.padding(padding);
        }
        match $o.per_dim("stride") {
            Some(stride) => layer(module.stride(stride)),
            None => layer(module),
        }
    }};
}

/// A loss with weights that its state has.
macro_rules! loss {
    ($case:ident, $mesh:ident, $module:expr $(, $weight:ident)*) => {{
        #[allow(unused_mut)]
        let mut module = $module;
        $(if let Some(weight) = $case["state"].get(stringify!($weight)) {
            module = module.$weight(&tensor($mesh, weight, Replicate)?);
        })*
        several(module)
    }};
}

fn build(case: &Value, builder: &Builder) -> Result<Built> {
    let (o, mesh) = (Options(&case["options"]), builder.mesh());
    let reduction = o.reduction();
    match case["module"].as_str().unwrap() {
        "RNN" if o.0["nonlinearity"] == "relu" => recurrent!(Rnn::with_relu(builder, o.recurrent())?),
        "RNN" => recurrent!(Rnn::new(builder, o.recurrent())?),
        "LSTM" => recurrent!(Lstm::new(builder, o.recurrent())?),
        "GRU" => recurrent!(Gru::new(builder, o.recurrent())?),
        "RNNCell" => cell!(RnnCell::new(builder, 2, 4, o.flag("bias", true))?),
        "LSTMCell" => cell!(LstmCell::new(builder, 2, 4, o.flag("bias", true))?),
        "GRUCell" => cell!(GruCell::new(builder, 2, 4, o.flag("bias", true))?),
        "InstanceNorm" => {
            let options = InstanceNormOptions {
                affine: o.flag("affine", false),
                track_running_stats: o.flag("track_running_stats", false),
                momentum: o.number("momentum", 0.1),
                ..InstanceNormOptions::default()
            };
            layer(InstanceNorm::new(builder, o.sizes()[0], options)?)
        }
        "LocalResponseNorm" => {
            let [alpha, beta, k] = ["alpha", "beta", "k"].map(|name| o.number(name, 1.0));
            layer(LocalResponseNorm::new(o.size("size"), alpha, beta, k))
        }
        "MaxPool1d" => max_pool!(o, MaxPool1d),
        "MaxPool2d" => max_pool!(o, MaxPool2d),
        "MaxPool3d" => max_pool!(o, MaxPool3d),
        "AvgPool1d" => avg_pool!(o, AvgPool1d),
        "AvgPool2d" => avg_pool!(o, AvgPool2d),
        "AvgPool3d" => avg_pool!(o, AvgPool3d),
        "LPPool1d" => lp_pool!(o, LpPool1d),
        "LPPool2d" => lp_pool!(o, LpPool2d),
        "LPPool3d" => lp_pool!(o, LpPool3d),
        "AdaptiveAvgPool1d" => layer(AdaptiveAvgPool1d::new(o.per_dim("output_size").unwrap())),
        "AdaptiveAvgPool2d" => layer(AdaptiveAvgPool2d::new(o.per_dim("output_size").unwrap())),
        "AdaptiveAvgPool3d" => layer(AdaptiveAvgPool3d::new(o.per_dim("output_size").unwrap())),
        "AdaptiveMaxPool1d" => layer(AdaptiveMaxPool1d::new(o.per_dim("output_size").unwrap())),
        "AdaptiveMaxPool2d" => layer(AdaptiveMaxPool2d::new(o.per_dim("output_size").unwrap())),
        "AdaptiveMaxPool3d" => layer(AdaptiveMaxPool3d::new(o.per_dim("output_size").unwrap())),
        "MaxUnpool1d" => unpool!(o, MaxUnpool1d),
        "MaxUnpool2d" => unpool!(o, MaxUnpool2d),
        "MaxUnpool3d" => unpool!(o, MaxUnpool3d),
        "PixelShuffle" => layer(PixelShuffle::new(o.size("upscale_factor"))),
        "PixelUnshuffle" => layer(PixelUnshuffle::new(o.size("downscale_factor"))),
        "ChannelShuffle" => layer(ChannelShuffle::new(o.size("groups"))),
        "Flatten" => layer(Flatten::new().dims(o.dim("start_dim"), o.dim("end_dim"))),
        "Unflatten" => {
            let sizes: Vec<isize> = o.list("unflattened_size").iter().map(|&n| n as isize).collect();
            layer(Unflatten::new(o.dim("dim"), sizes))
        }
        "Identity" => layer(Identity::new()),
        "ReflectionPad" => layer(ReflectionPad::new(o.borders())),
        "ReplicationPad" => layer(ReplicationPad::new(o.borders())),
        "CircularPad" => layer(CircularPad::new(o.borders())),
        "ZeroPad" => layer(ZeroPad::new(o.borders())),
        "ConstantPad" => {
            let borders: Vec<(usize, usize)> = o.borders().iter().map(|&(a, b)| (a as usize, b as usize)).collect();
            layer(ConstantPad::new(&borders, o.number("value", 0.0)))
        }
        "Unfold" => columns!(o, Unfold::new(o.per_dim("kernel_size").unwrap())),
        "Fold" => {
            columns!(o, Fold::new(o.per_dim("output_size").unwrap(), o.per_dim("kernel_size").unwrap()))
        }
        "Upsample" => {
            let sizes: Vec<usize> = o.list("size").iter().map(|&n| n as usize).collect();
            let to = if sizes.is_empty() { Upsample::by(&o.list("scale_factor")) } else { Upsample::new(&sizes) };
            let mode = match o.0["mode"].as_str() {
                Some("bicubic") => Interpolation::Bicubic,
                Some(_) => Interpolation::Linear,
                None => Interpolation::Nearest,
            };
            layer(to.mode(mode).align_corners(o.flag("align_corners", false)))
        }
        "ReLU" => layer(Relu::new()),
        "ReLU6" => layer(Relu6::new()),
        "GELU" if o.0["approximate"] == "tanh" => layer(GeluTanh::new()),
        "GELU" => layer(Gelu::new()),
        "SiLU" => layer(Silu::new()),
        "Tanh" => layer(Tanh::new()),
        "Sigmoid" => layer(Sigmoid::new()),
        "Hardsigmoid" => layer(Hardsigmoid::new()),
        "Hardswish" => layer(Hardswish::new()),
        "SELU" => layer(Selu::new()),
        "Mish" => layer(Mish::new()),
        "Tanhshrink" => layer(Tanhshrink::new()),
        "Softsign" => layer(Softsign::new()),
        "LogSigmoid" => layer(LogSigmoid::new()),
        "Softmax2d" => layer(Softmax2d::new()),
        "Hardtanh" => layer(Hardtanh::new(o.number("min_val", -1.0), o.number("max_val", 1.0))),
        "LeakyReLU" => layer(LeakyRelu::new(o.number("negative_slope", 0.01))),
        "ELU" => layer(Elu::new(o.number("alpha", 1.0))),
        "CELU" => layer(Celu::new(o.number("alpha", 1.0))),
        "Hardshrink" => layer(Hardshrink::new(o.number("lambd", 0.5))),
        "Softshrink" => layer(Softshrink::new(o.number("lambd", 0.5))),
        "Threshold" => layer(Threshold::new(o.number("threshold", 0.0), o.number("value", 0.0))),
        "Softplus" => layer(Softplus::new(o.number("beta", 1.0), o.number("threshold", 20.0))),
        "Softmax" => layer(Softmax::new(o.dim("dim"))),
        "LogSoftmax" => layer(LogSoftmax::new(o.dim("dim"))),
        "Softmin" => layer(Softmin::new(o.dim("dim"))),
        "GLU" => layer(Glu::new(o.dim("dim"))),
        "RReLU" => layer(RandomizedRelu::new(o.number("lower", 0.125), o.number("upper", 1.0 / 3.0))),
        "PReLU" => layer(PRelu::new(builder, o.size("num_parameters"), 0.25)?),
        "Dropout2d" => layer(Dropout2d::new(o.number("p", 0.5))?),
        "AlphaDropout" => layer(AlphaDropout::new(o.number("p", 0.5))?),
        "CosineSimilarity" => several(CosineSimilarity::new(o.dim("dim"), o.number("eps", 0.0))),
        "PairwiseDistance" => {
            several(PairwiseDistance::new(o.number("p", 2.0), o.number("eps", 0.0), o.flag("keepdim", false)))
        }
        "Bilinear" => several(Bilinear::new(builder, [6, 3], 4, true)?),
        "Embedding" => layer(Embedding::with_options(builder, 6, 4, o.embedding())?),
        "EmbeddingBag" => {
            let mode = match o.0["mode"].as_str() {
                Some("sum") => EmbeddingBagMode::Sum,
                Some("max") => EmbeddingBagMode::Max,
                _ => EmbeddingBagMode::Mean,
            };
            layer(EmbeddingBag::with_options(builder, 6, 4, mode, o.embedding())?)
        }
        "L1Loss" => loss!(case, mesh, L1Loss::new().reduction(reduction)),
        "MSELoss" => loss!(case, mesh, MseLoss::new().reduction(reduction)),
        "SmoothL1Loss" => loss!(case, mesh, SmoothL1Loss::new().reduction(reduction).beta(o.number("beta", 1.0))),
        "HuberLoss" => loss!(case, mesh, HuberLoss::new().reduction(reduction).delta(o.number("delta", 1.0))),
        "CrossEntropyLoss" => {
            let loss = CrossEntropyLoss::new().reduction(reduction).label_smoothing(o.number("label_smoothing", 0.0));
            loss!(case, mesh, loss.ignore_index(o.number("ignore_index", -100.0) as i64), weight)
        }
        "NLLLoss" => {
            let loss = NllLoss::new().reduction(reduction).ignore_index(o.number("ignore_index", -100.0) as i64);
            loss!(case, mesh, loss, weight)
        }
        "PoissonNLLLoss" => {
            let loss = PoissonNllLoss::new().reduction(reduction).full(o.flag("full", false));
            loss!(case, mesh, loss.log_input(o.flag("log_input", true)))
        }
        "GaussianNLLLoss" => {
            loss!(case, mesh, GaussianNllLoss::new().reduction(reduction).full(o.flag("full", false)))
        }
        "KLDivLoss" => {
            loss!(case, mesh, KlDivLoss::new().reduction(reduction).log_target(o.flag("log_target", false)))
        }
        "BCELoss" => loss!(case, mesh, BceLoss::new().reduction(reduction), weight),
        "BCEWithLogitsLoss" => {
            loss!(case, mesh, BceWithLogitsLoss::new().reduction(reduction), weight, pos_weight)
        }
        "MarginRankingLoss" => {
            loss!(case, mesh, MarginRankingLoss::new().reduction(reduction).margin(o.number("margin", 0.0)))
        }
        "HingeEmbeddingLoss" => {
            loss!(case, mesh, HingeEmbeddingLoss::new().reduction(reduction).margin(o.number("margin", 1.0)))
        }
        "SoftMarginLoss" => loss!(case, mesh, SoftMarginLoss::new().reduction(reduction)),
        "MultiLabelMarginLoss" => loss!(case, mesh, MultilabelMarginLoss::new().reduction(reduction)),
        "MultiLabelSoftMarginLoss" => {
            loss!(case, mesh, MultilabelSoftMarginLoss::new().reduction(reduction), weight)
        }
        "MultiMarginLoss" => {
            let loss = MultiMarginLoss::new().reduction(reduction).p(o.number("p", 1.0));
            loss!(case, mesh, loss.margin(o.number("margin", 1.0)), weight)
        }
        "CosineEmbeddingLoss" => {
            loss!(case, mesh, CosineEmbeddingLoss::new().reduction(reduction).margin(o.number("margin", 0.0)))
        }
        "TripletMarginLoss" => {
            let loss = TripletMarginLoss::new().reduction(reduction).margin(o.number("margin", 1.0));
            loss!(case, mesh, loss.swap(o.flag("swap", false)))
        }
        "CTCLoss" => {
            let module = std::rc::Rc::new(CtcLoss::new(CtcOptions { reduction, ..CtcOptions::default() }));
            let run = module.clone();
            Ok((module, Box::new(move |x| Ok(vec![run.forward(&x[0], &x[1], &[5, 4], &[3, 2])?]))))
        }
        other => panic!("no module for {other}"),
    }
}

fn plain(recorded: &Value) -> Result<Tensor> {
    let shape: Vec<usize> =
        recorded["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
    let data = recorded["data"].as_array().unwrap();
    Ok(match recorded["dtype"] == "i64" {
        true => Tensor::from_vec(data.iter().map(|x| x.as_i64().unwrap()).collect::<Vec<_>>(), shape, &Device::Cpu)?,
        false => Tensor::from_vec(data.iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>(), shape, &Device::Cpu)?,
    })
}

fn tensor(mesh: &DeviceMesh, recorded: &Value, placement: Placement) -> Result<DTensor> {
    let tensor = plain(recorded)?;
    let fits = |dim: isize| (dim.unsigned_abs()) < tensor.rank().max(1);
    let placement = match placement {
        Shard(dim) if tensor.rank() == 0 || !fits(dim) => Replicate,
        placement => placement,
    };
    DTensor::distribute_tensor(&tensor, mesh, [placement], None)
}

/// Equal up to the rounding of a few operations.
fn assert_close(found: &DTensor, expected: &Value, what: &str) -> Result<()> {
    let (found, expected) = (found.full_tensor()?, plain(expected)?);
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let numbers = |t: &Tensor| t.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    let (found, expected) = (numbers(&found)?, numbers(&expected)?);
    for (a, b) in found.iter().zip(&expected) {
        let close = a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-9 * b.abs().max(1.0);
        assert!(close, "{what}: got {found:?}, expected {expected:?}");
    }
    Ok(())
}

/// How parameters are placed in a run: replicated, or sharded by features.
fn placement_of_parameters(case: &Value, sharded: bool) -> Placement {
    let gates = match case["module"].as_str().unwrap() {
        "LSTM" | "LSTMCell" => 4,
        "GRU" | "GRUCell" => 3,
        _ => 1,
    };
    match (sharded, gates) {
        (false, _) => Replicate,
        (true, 1) => Shard(0),
        (true, gates) => Placement::StridedShard { dim: 0, split_factor: gates },
    }
}

fn check(mesh: &DeviceMesh, case: &Value, placement: &Placement, sharded: bool) -> Result<()> {
    let what = format!("{} {} of {placement} inputs, parameters sharded: {sharded}", case["module"], case["options"]);
    let of_parameters = placement_of_parameters(case, sharded);
    let builder = Builder::new(mesh).dtype(DType::F64).placed(move |_, _| vec![of_parameters.clone()]);
    let (module, run) = build(case, &builder)?;
    let state = case["state"].as_object().unwrap();
    let given = state.iter().map(|(name, value)| Ok((name.clone(), tensor(mesh, value, Replicate)?)));
    let given = given.collect::<Result<BTreeMap<String, DTensor>>>()?;
    module.load_state_dict(&given)?;
    let input = |(i, value): (usize, &Value)| {
        let x = tensor(mesh, value, placement.clone())?;
        Ok(if case["gradients"].get(format!("input{i}")).is_some() { x.requires_grad() } else { x })
    };
    let inputs = case["inputs"].as_array().unwrap().iter().enumerate().map(input).collect::<Result<Vec<_>>>()?;
    if case["evaluate"] == true {
        run(&inputs)?;
        module.eval();
    }
    let outputs = run(&inputs)?;
    let expected = case["outputs"].as_array().unwrap();
    assert_eq!(outputs.len(), expected.len(), "{what}");
    let mut loss: Option<DTensor> = None;
    for (i, (output, expected)) in outputs.iter().zip(expected).enumerate() {
        assert_close(output, expected, &format!("output {i} of {what}"))?;
        let shape = output.shape().to_vec();
        let weight =
            move |at: &[usize]| (at.iter().zip(&shape).fold(0, |flat, (i, n)| flat * n + i) as f64 + 1.0).cos();
        let weights = DTensor::from_fn(output.shape(), DType::F64, mesh, [Replicate], weight)?;
        let part = output.mul(&weights)?.sum_all()?;
        loss = Some(loss.map_or(Ok(part.clone()), |loss| loss.add(&part))?);
    }
    let found = loss.expect("an output").backward()?;
    for (name, expected) in case["gradients"].as_object().unwrap() {
        let of = match name.strip_prefix("input") {
            Some(number) => inputs[number.parse::<usize>().unwrap()].clone(),
            None => {
                let named = module.named_parameters();
                named.into_iter().find(|(path, _)| path == name).unwrap_or_else(|| panic!("{name} in {what}")).1.get()
            }
        };
        match found.get(&of) {
            Ok(gradient) => assert_close(gradient, expected, &format!("gradient of {name} of {what}"))?,
            Err(_) => {
                assert!(
                    plain(expected)?.flatten_all()?.to_vec1::<f64>()?.iter().all(|&g| g == 0.0),
                    "{name} of {what}"
                );
            }
        }
    }
    Ok(())
}

fn cases() -> Vec<Value> {
    RECORDED.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn modules_and_their_gradients_equal_those_of_pytorch_in_every_placement() {
    for ranks in [1, 2] {
        launch(ranks, move |world| {
            let mesh = world.mesh([("a", ranks)])?;
            for case in cases() {
                let placements = [Replicate, Shard(0), Shard(1), Shard(-1)];
                for placement in &placements[..if ranks == 1 { 1 } else { 4 }] {
                    check(&mesh, &case, placement, false)?;
                }
                if ranks > 1 && !case["state"].as_object().unwrap().is_empty() {
                    check(&mesh, &case, &Replicate, true)?;
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

/// Every loss of PyTorch that is a module, and every way to reduce it, has a recorded case.
#[test]
fn every_reduction_of_every_loss_is_recorded() {
    const LOSSES: [&str; 20] = [
        "L1Loss",
        "MSELoss",
        "SmoothL1Loss",
        "HuberLoss",
        "CrossEntropyLoss",
        "NLLLoss",
        "PoissonNLLLoss",
        "GaussianNLLLoss",
        "KLDivLoss",
        "BCELoss",
        "BCEWithLogitsLoss",
        "MarginRankingLoss",
        "HingeEmbeddingLoss",
        "SoftMarginLoss",
        "MultiLabelMarginLoss",
        "MultiLabelSoftMarginLoss",
        "MultiMarginLoss",
        "CosineEmbeddingLoss",
        "TripletMarginLoss",
        "CTCLoss",
    ];
    let cases = cases();
    let recorded = |loss: &str, reduction: &str| {
        cases.iter().any(|case| case["module"] == loss && case["options"]["reduction"] == reduction)
    };
    let mut missing = Vec::new();
    for loss in LOSSES {
        let batch_mean = if loss == "KLDivLoss" { &["batchmean"][..] } else { &[] };
        for reduction in ["none", "sum", "mean"].iter().chain(batch_mean) {
            missing.extend((!recorded(loss, reduction)).then(|| format!("{loss}({reduction})")));
        }
    }
    assert!(missing.is_empty(), "without a recorded case: {missing:?}");
}

#[test]
fn hidden_features_of_an_lstm_are_sharded_with_one_gather_per_step() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let gates = Placement::StridedShard { dim: 0, split_factor: 4 };
        let builder = Builder::new(&mesh).placed(move |_, _| vec![gates.clone()]);
        let lstm = Lstm::new(&builder, RecurrentOptions::new(3, 8))?;
        let x = DTensor::randn((5, 4, 3), &mesh, [Replicate])?;
        world.trace().clear();
        let y = lstm.forward(&x)?;
        assert_eq!(y.placements(), [Shard(2)]);
        let calls = world.trace().records().iter().filter(|r| r.call != "agree").count();
        // The state of zeros is replicated, and the last state is not gathered.
        assert_eq!(calls, 4, "{:?}", world.trace().records());
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_inputs_of_recurrent_layers_are_refused_with_their_shapes() {
    launch(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let builder = Builder::new(&mesh);
        for options in [
            RecurrentOptions::new(3, 0),
            RecurrentOptions::new(3, 4).num_layers(0),
            RecurrentOptions::new(3, 4).dropout(1.5),
            RecurrentOptions::new(3, 4).proj_size(2),
        ] {
            let error = Gru::new(&builder, options).map(drop).unwrap_err().to_string();
            assert!(error.contains("hidden_size") && error.contains("correct the options"), "{error}");
        }
        let gru = Gru::new(&builder, RecurrentOptions::new(3, 4))?;
        let x = DTensor::ones((5, 2, 3), DType::F32, &mesh, [Shard(1)])?;
        let hidden = DTensor::ones((1, 3, 4), DType::F32, &mesh, [Replicate])?;
        let error =
            gru.forward_state(&x, Some(&RecurrentState { hidden, cell: None })).map(drop).unwrap_err().to_string();
        assert!(error.contains("[1, 3, 4]") && error.contains("[1, 2, 4]"), "{error}");
        let error = gru.forward(&x.reshape(&[-1])?).unwrap_err().to_string();
        assert!(error.contains("[time, n, features]"), "{error}");
        let error = gru.forward(&DTensor::ones((5, 2, 7), DType::F32, &mesh, [Shard(1)])?).unwrap_err().to_string();
        assert!(error.contains("input has 7 features, weight takes 3"), "{error}");
        world.barrier()
    })
    .unwrap();
}
