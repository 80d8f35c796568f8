//! Layers without parameters, convolutions without a bias, `Sequential`, and modules with several inputs and outputs, on 1,
//! 2 and 3 ranks against the unsharded result.

use shardwise::nn::{
    AvgPool1d, AvgPool2d, ConstantPad, Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Elu, Flatten, ForwardAll, Gelu,
    GeluTanh, Hooks, Layer, LeakyRelu, Linear, LogSoftmax, MaxPool1d, MaxPool2d, Relu, Sequential, Sigmoid, Silu,
    Softmax, Softplus, Tanh,
};
use shardwise::ops::ConvOptions;
use shardwise::plan::{PrepareModuleInput, PrepareModuleOutput, ShardingPlan, parallelize_module, shard_module};
use shardwise::prelude::*;

fn on_each_world(run: impl Fn(&DeviceMesh) -> Result<()> + Clone + Send + Sync + 'static) {
    for ranks in 1..=3 {
        let run = run.clone();
        ThreadWorld::new(ranks).unwrap().run(move |world| run(&world.mesh([("a", world.size())])?)).unwrap();
    }
}

/// The same numbers in every placement.
fn input(mesh: &DeviceMesh, shape: &[usize], placement: Placement) -> Result<DTensor> {
    let value = |index: &[usize]| index.iter().fold(0.7, |sum: f64, &i| sum * 1.9 + i as f64).sin() * 2.0;
    DTensor::from_fn(shape, DType::F64, mesh, [placement], value)
}

type Check = fn(&DTensor) -> Result<DTensor>;

#[test]
fn layers_without_parameters_equal_their_operators() {
    on_each_world(|mesh| {
        let cases: Vec<(Box<dyn Layer>, Check)> = vec![
            (Box::new(Relu::new()), |x| x.relu()),
            (Box::new(Gelu::new()), |x| x.gelu()),
            (Box::new(GeluTanh::new()), |x| x.gelu_tanh()),
            (Box::new(Silu::new()), |x| x.silu()),
            (Box::new(Tanh::new()), |x| x.tanh()),
            (Box::new(Sigmoid::new()), |x| x.sigmoid()),
            (Box::new(LeakyRelu::new(0.1)), |x| x.leaky_relu(0.1)),
            (Box::new(Elu::new(1.5)), |x| x.elu(1.5)),
            (Box::new(Softplus::new(1.0, 20.0)), |x| x.softplus(1.0, 20.0)),
            (Box::new(Softmax::new(-1)), |x| x.softmax(-1)),
            (Box::new(LogSoftmax::new(1)), |x| x.log_softmax(1)),
            (Box::new(MaxPool1d::new(2)), |x| x.max_pool1d(2, None, 0)),
            (Box::new(AvgPool1d::new(3).stride(1).padding(1)), |x| x.avg_pool1d(3, Some(1), 1)),
            (Box::new(ConstantPad::new(&[(1, 2), (0, 1)], 0.5)), |x| x.pad(&[(1, 2), (0, 1)], 0.5)),
            (Box::new(Flatten::new()), |x| x.reshape(&[3, 24])),
        ];
        for (layer, operator) in &cases {
            let whole = operator(&input(mesh, &[3, 4, 6], Replicate)?)?;
            for placement in [Replicate, Shard(0), Shard(1), Shard(2)] {
                let y = layer.forward(&input(mesh, &[3, 4, 6], placement.clone())?)?;
                assert!(y.allclose(&whole, 1e-12, 1e-12)?, "{placement}");
            }
            assert_eq!(layer.parameter_count(), 0);
        }
        let x = input(mesh, &[2, 3, 4, 6], Shard(2))?;
        assert!(MaxPool2d::new(2).forward(&x)?.equal(&x.max_pool2d(2, None, 0)?)?);
        assert!(AvgPool2d::new(2).stride(1).forward(&x)?.equal(&x.avg_pool2d(2, Some(1), 0)?)?);
        Ok(())
    });
}

#[test]
fn hooks_of_layers_without_parameters_run() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let relu = Relu::new();
        relu.hooks.on_input(|x| x.redistribute([Shard(1)]));
        assert_eq!(relu.forward(&input(&mesh, &[2, 4], Shard(0))?)?.placements(), [Shard(1)]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn convolutions_work_without_a_bias() {
    on_each_world(|mesh| {
        let builder = Builder::new(mesh).dtype(DType::F64);
        let options = ConvOptions { padding: 1, ..Default::default() };
        let line = Conv1dOptions::new(4, 6, 3).padding(1);
        let plane = Conv2dOptions::new(4, 2, 3).padding(1).bias(false);
        let with = Conv1d::new(&builder.child("other"), line)?;
        let line = Conv1d::new(&builder.child("line"), line.bias(false))?;
        let plane = Conv2d::new(&builder.child("plane"), plane)?;
        assert_eq!((line.parameter_count(), plane.parameter_count()), (72, 72));
        for placement in [Replicate, Shard(0), Shard(2)] {
            let x = input(mesh, &[3, 4, 6], placement.clone())?;
            assert!(line.forward(&x)?.allclose(&x.conv1d(&line.weight.get(), None, options)?, 1e-12, 1e-12)?);
            let x = input(mesh, &[3, 4, 6, 5], placement)?;
            assert!(plane.forward(&x)?.allclose(&x.conv2d(&plane.weight.get(), None, options)?, 1e-12, 1e-12)?);
        }
        // the bias is next to the same weight
        assert_eq!(with.parameter_count(), 78);
        Ok(())
    });
}

fn network(mesh: &DeviceMesh) -> Result<Sequential> {
    Sequential::new(&Builder::new(mesh).dtype(DType::F64))
        .build(|builder| Conv1d::new(builder, Conv1dOptions::new(2, 4, 3)))?
        .add(Tanh::new())
        .add(MaxPool1d::new(2))
        .add(Flatten::new())
        .build(|builder| Linear::new(builder, 12, 5))
}

#[test]
fn a_sequential_runs_its_layers_and_names_them_by_number() {
    on_each_world(|mesh| {
        let model = network(mesh)?;
        let names: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["0.weight", "0.bias", "4.weight", "4.bias"]);
        assert_eq!((model.len(), model.is_empty()), (5, false));
        let params: Vec<DTensor> = model.named_parameters().iter().map(|(_, p)| p.get()).collect();
        let by_hand = |x: &DTensor| -> Result<DTensor> {
            let x = x.conv1d(&params[0], Some(&params[1]), ConvOptions::default())?.tanh()?.max_pool1d(2, None, 0)?;
            x.flatten(1, -1)?.linear(&params[2], Some(&params[3]))
        };
        let whole = by_hand(&input(mesh, &[3, 2, 8], Replicate)?)?;
        let gradient =
            whole.square()?.sum_all()?.backward()?.get(&params[0])?.full_tensor()?.flatten_all()?.to_vec1::<f64>()?;
        for placement in [Replicate, Shard(0), Shard(2)] {
            let y = model.forward(&input(mesh, &[3, 2, 8], placement)?)?;
            assert!(y.allclose(&whole, 1e-12, 1e-12)?);
            let found = y.square()?.sum_all()?.backward()?;
            let found = found.get(&params[0])?.full_tensor()?.flatten_all()?.to_vec1::<f64>()?;
            assert!(found.iter().zip(&gradient).all(|(a, b)| (a - b).abs() < 1e-9));
        }
        // plans find the layers
        shard_module(&model, mesh, &ShardingPlan::new().param("4.weight", [Shard(0)]).output("2", [Shard(1)]))?;
        assert_eq!(model.named_parameters()[2].1.layout().placements(), [Shard(0)]);
        assert!(model.forward(&input(mesh, &[3, 2, 8], Shard(0))?)?.allclose(&whole, 1e-12, 1e-12)?);
        Ok(())
    });
}

/// Adds a product of its inputs to the first, and returns both.
#[derive(Module)]
struct Mix {
    weight: Linear,
    hooks: Hooks,
}

impl ForwardAll for Mix {
    fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
        self.hooks.run_all(inputs, |x| {
            let product = (&x[0] * self.weight.forward(&x[1])?)?;
            Ok(vec![(&x[0] + &product)?, product])
        })
    }
}

#[test]
fn parallel_styles_and_plans_prepare_every_input_and_output() {
    on_each_world(|mesh| {
        let builder = Builder::new(mesh).dtype(DType::F64);
        let mix = || -> Result<Mix> {
            Ok(Mix { weight: Linear::without_bias(&builder.child("weight"), 4, 4)?, hooks: builder.hooks() })
        };
        let (x, y) = (input(mesh, &[6, 4], Replicate)?, input(mesh, &[6, 4], Shard(0))?);
        let plain = mix()?;
        let whole = plain.forward_all(&[&x, &y])?;
        let styled = mix()?;
        styled.weight.weight.set(&plain.weight.weight.get())?;
        parallelize_module(
            &styled,
            mesh,
            &[
                ("", &PrepareModuleInput::new("a", Shard(1)).number(0)),
                ("", &PrepareModuleInput::new("a", Replicate).number(1)),
                ("", &PrepareModuleOutput::new("a", Replicate).number(1)),
            ],
        )?;
        let outputs = styled.forward_all(&[&x, &y])?;
        assert!(outputs[0].allclose(&whole[0], 1e-12, 1e-12)? && outputs[1].allclose(&whole[1], 1e-12, 1e-12)?);
        assert_eq!((outputs[0].placements(), outputs[1].placements()), (&[Shard(1)][..], &[Replicate][..]));
        // the same as a plan, which is a value that can be printed and stored
        let plan = ShardingPlan::new().input_at("", 0, [Shard(1)]).output_at("", 1, [Shard(0)]);
        assert!(plan.to_string().contains("input 0") && plan.to_string().contains("output 1"), "{plan}");
        let planned = mix()?;
        shard_module(&planned, mesh, &plan)?;
        let outputs = planned.forward_all(&[&x, &x])?;
        assert_eq!((outputs[0].placements(), outputs[1].placements()), (&[Shard(1)][..], &[Shard(0)][..]));
        // an index of an input that the module does not have
        planned.hooks.on_input_at(2, |x| Ok(x.clone()));
        let error = planned.forward_all(&[&x, &x]).unwrap_err().to_string();
        assert!(error.contains("a hook for input 2 of a module with 2"), "{error}");
        assert!(shard_module(&mix()?, mesh, &ShardingPlan::new().input_at("nowhere", 1, [Shard(0)])).is_err());
        Ok(())
    });
}
