//! Errors inside layers name the module and the line of the program that called it.

use shardwise::models::{GptConfig, ModelConfig, ModelSpec};
use shardwise::nn::{Activation, Builder, Dropout, Forward, Hooks, Layer, LayerNorm, Linear, Mlp, Module};
use shardwise::prelude::*;

#[derive(Module)]
struct Block {
    mlp: Mlp,
}

#[derive(Module)]
struct Model {
    blocks: Vec<Block>,
    drop: Dropout,
}

impl Model {
    fn new(builder: &Builder) -> Result<Self> {
        let block = |i: usize| -> Result<Block> {
            let builder = builder.child(&format!("blocks.{i}.mlp"));
            Ok(Block { mlp: Mlp::new(&builder, 8, 16, Activation::Relu)? })
        };
        Ok(Model { blocks: vec![block(0)?, block(1)?], drop: Dropout::new(0.5)? })
    }
}

impl Forward for Model {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let y = self.blocks[0].mlp.forward(x)?;
        self.drop.forward(&y)
    }
}

/// The error of a program on two ranks.
fn error_of(program: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + 'static) -> Error {
    let ran = launch(2, move |world| program(&world.mesh([("tp", 2)])?));
    match ran.map(|_| ()).expect_err("the program fails") {
        Error::Rank { source, .. } => *source,
        error => error,
    }
}

#[test]
fn an_error_inside_a_layer_names_its_path_and_the_line_of_the_program() {
    const LINE: u32 = line!() + 3; // of the call of the model
    let error = error_of(|mesh| {
        let model = Model::new(&Builder::new(mesh))?;
        model.forward(&DTensor::ones((2, 7), DType::F32, mesh, [Replicate])?).map(drop)
    });
    let text = error.to_string();
    assert!(text.starts_with("`blocks.0.mlp.up` (called at "), "{text}");
    assert!(text.contains("input has 7 features, weight takes 8"), "{text}");
    let Error::InModule { path, site, source } = error else { panic!("{text}") };
    assert_eq!(&*path, "blocks.0.mlp.up");
    assert!(site.file().ends_with("tests/training/module_errors.rs"), "{site}");
    assert_eq!(site.line(), LINE, "the line of the program, not one inside nn");
    assert!(matches!(*source, Error::Invalid(_)), "{source}");
    assert!(!source.to_string().contains("src/nn/"), "{source}");
}

#[test]
fn a_module_built_without_a_path_gets_it_from_a_walk_over_the_model() {
    #[derive(Module)]
    struct Pair {
        first: Linear,
        second: Linear,
    }
    let error = error_of(|mesh| {
        let root = Builder::new(mesh);
        let pair = Pair { first: Linear::new(&root, 4, 4)?, second: Linear::new(&root, 3, 4)? };
        assert_eq!(pair.named_parameters().len(), 4);
        pair.second.named_parameters(); // begins at the layer, and must not shorten its path
        pair.second.forward(&pair.first.forward(&DTensor::ones((2, 4), DType::F32, mesh, [Replicate])?)?).map(drop)
    });
    assert!(error.to_string().starts_with("`second` (called at "), "{error}");
}

#[test]
fn errors_in_hooks_and_replacements_name_the_module() {
    let error = error_of(|mesh| {
        let model = Model::new(&Builder::new(mesh))?;
        let narrow: std::sync::Arc<dyn Layer> = std::sync::Arc::new(Linear::new(&Builder::new(mesh), 5, 5)?);
        model.blocks[0].mlp.down.hooks.replace(narrow);
        model.forward(&DTensor::ones((2, 8), DType::F32, mesh, [Replicate])?).map(drop)
    });
    assert!(error.to_string().starts_with("`blocks.0.mlp.down` (called at "), "{error}");
    assert!(error.to_string().contains("input has 16 features, weight takes 5"), "{error}");
    let error = error_of(|mesh| {
        let model = Model::new(&Builder::new(mesh))?;
        model.blocks[0].mlp.hooks.on_output(|y| y.reshape(&[3, 5]));
        model.forward(&DTensor::ones((2, 8), DType::F32, mesh, [Replicate])?).map(drop)
    });
    assert!(error.to_string().starts_with("`blocks.0.mlp` (called at "), "{error}");
    let error = error_of(|mesh| {
        let hooks = Hooks::default();
        hooks.run(&DTensor::ones(3, DType::F32, mesh, [Replicate])?, |x| x.reshape(&[2, 2])).map(drop)
    });
    assert!(matches!(error, Error::Invalid(_)), "a module without a path adds nothing: {error}");
}

#[test]
fn errors_name_the_layers_of_built_in_models() {
    let error = error_of(|mesh| {
        let config = GptConfig { n_layers: 2, d_model: 16, d_ff: 32, n_heads: 4, ..GptConfig::default() };
        let model = ModelConfig::Gpt(config).build(&Builder::new(mesh))?;
        let ids = DTensor::ones((2, 4), DType::F32, mesh, [Replicate])?; // ids are integers
        model.forward(&ids).map(drop)
    });
    assert!(error.to_string().starts_with("`tokens` (called at "), "{error}");
}

#[test]
fn a_mismatch_inside_a_layer_names_the_lines_of_the_program() {
    let error = error_of(|mesh| {
        let norm = LayerNorm::new(&Builder::new(mesh).child("norm"), 8, 1e-5)?;
        let x = DTensor::ones((2, 8), DType::F32, mesh, [Shard(1)])?;
        match mesh.world().rank() {
            0 => norm.forward(&x).map(drop), // communicates statistics
            _ => x.redistribute([Replicate]).map(drop),
        }
    });
    let text = error.to_string();
    assert_eq!(text.matches("tests/training/module_errors.rs").count(), 2, "{text}");
    assert!(!text.contains("src/nn/"), "{text}");
}
