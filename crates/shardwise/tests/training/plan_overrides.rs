//! Entries of a plan can be overridden and removed; an entry that never applies or matches nothing is an error.

use shardwise::nn::{Activation, Builder, Forward, Linear, Mlp, Module};
use shardwise::plan::{DataParallel, FullyShard, ShardingPlan, ShardingPlanner, TensorParallel, shard_module};
use shardwise::prelude::*;

#[derive(Module)]
struct Model {
    blocks: Vec<Mlp>,
    head: Linear,
}

impl Model {
    fn new(builder: &Builder) -> Result<Self> {
        let block = |i: usize| Mlp::new(&builder.child(&format!("blocks.{i}")), 8, 16, Activation::Relu);
        Ok(Model {
            blocks: (0..4).map(block).collect::<Result<_>>()?,
            head: Linear::new(&builder.child("head"), 8, 12)?,
        })
    }

    fn placements(&self, path: &str) -> Vec<Placement> {
        let all = self.named_parameters();
        all.iter().find(|(own, _)| own == path).expect("a parameter").1.layout().placements().to_vec()
    }
}

fn on_two_axes(program: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + 'static) {
    launch(4, move |world| program(&world.mesh([("dp", 2), ("tp", 2)])?)).unwrap();
}

/// The error of a plan for a new model.
fn refused(mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<String> {
    let model = Model::new(&Builder::new(mesh))?;
    let before: Vec<Layout> = model.named_parameters().iter().map(|(_, p)| p.layout()).collect();
    let error = shard_module(&model, mesh, plan).expect_err("refused").to_string();
    let after: Vec<Layout> = model.named_parameters().iter().map(|(_, p)| p.layout()).collect();
    assert_eq!(before, after, "{error}");
    Ok(error)
}

#[test]
fn an_override_that_never_applies_is_an_error() {
    on_two_axes(|mesh| {
        let model = Model::new(&Builder::new(mesh))?;
        let planned = TensorParallel::new("tp").plan(&model, mesh)?;
        // the planner names every parameter, and exact paths take precedence over patterns
        let error = refused(mesh, &planned.clone().param("**.up.weight", [("tp", Replicate)]))?;
        for part in ["`**.up.weight`", "4 parameter(s)", "`blocks.0.up.weight` counts before it", "replace("] {
            assert!(error.contains(part), "{part} missing in {error}");
        }
        let error = refused(mesh, &planned.output("blocks.*.down", [("tp", Shard(0))]))?;
        assert!(error.contains("`blocks.*.down`") && error.contains("counts for none"), "{error}");
        // under a replacement that fits all of them
        let plan = ShardingPlan::new().param("blocks.[01].up.weight", [("tp", Shard(0))]);
        let error = refused(mesh, &plan.replace("blocks.*.up.weight", [("tp", Shard(1))]))?;
        assert!(error.contains("`blocks.[01].up.weight`") && error.contains("`blocks.*.up.weight` counts"), "{error}");
        // one that applies somewhere is fine
        let plan = ShardingPlan::new().param("blocks.0.up.weight", [("tp", Shard(0))]);
        shard_module(&model, mesh, &plan.param("**.up.weight", [("tp", Shard(1))]))?;
        assert_eq!(model.placements("blocks.0.up.weight"), [Replicate, Shard(0)]);
        assert_eq!(model.placements("blocks.3.up.weight"), [Replicate, Shard(1)]);
        Ok(())
    });
}

#[test]
fn a_planner_extends_a_plan_of_patterns() {
    on_two_axes(|mesh| {
        let model = Model::new(&Builder::new(mesh))?;
        let base = ShardingPlan::new().param("**.up.{weight,bias}", [("tp", Shard(0))]);
        let plan = FullyShard::new(["dp"]).on_dim(1).extend(base, &model, mesh)?;
        shard_module(&model, mesh, &plan)?;
        assert_eq!(model.placements("blocks.1.up.weight"), [Shard(1), Shard(0)]);
        // the same pattern a second time never applies
        let error = refused(mesh, &plan.param("**.up.{weight,bias}", [("tp", Replicate)]))?;
        assert!(error.contains("counts for none"), "{error}");
        Ok(())
    });
}

#[test]
fn entries_are_replaced_and_removed() {
    on_two_axes(|mesh| {
        let planned = |model: &Model| TensorParallel::new("tp").and(DataParallel::new(["dp"])).plan(model, mesh);
        let new = || Model::new(&Builder::new(mesh));
        let model = new()?;
        let plan = planned(&model)?.replace("blocks.[1-2].up.weight", [("tp", Replicate)]);
        shard_module(&model, mesh, &plan)?;
        assert_eq!(model.placements("blocks.0.up.weight"), [Replicate, Shard(0)]);
        assert_eq!(model.placements("blocks.1.up.weight"), [Replicate, Replicate]);
        assert_eq!(model.placements("blocks.2.up.weight"), [Replicate, Replicate]);
        assert_eq!(model.placements("blocks.3.up.weight"), [Replicate, Shard(0)]);
        assert_eq!(model.placements("blocks.1.up.bias"), [Replicate, Shard(0)]);
        // precedence: a later exact path, then the last replacement, then earlier ones, then other patterns
        let model = new()?;
        let plan = ShardingPlan::new()
            .param("**.weight", [("tp", Shard(0))])
            .replace("blocks.?.{up,down}.weight", [("tp", Shard(1))])
            .replace("blocks.[!0]*.up.weight", [("dp", Shard(0))])
            .param("blocks.3.up.weight", [("tp", Shard(0)), ("dp", Shard(0))]);
        shard_module(&model, mesh, &plan)?;
        assert_eq!(model.placements("head.weight"), [Replicate, Shard(0)]);
        assert_eq!(model.placements("blocks.0.up.weight"), [Replicate, Shard(1)]);
        assert_eq!(model.placements("blocks.1.up.weight"), [Shard(0), Replicate]);
        assert_eq!(model.placements("blocks.3.up.weight"), [Shard(0), Shard(0)]);
        assert_eq!(model.placements("blocks.3.down.weight"), [Replicate, Shard(1)]);
        let stored: ShardingPlan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(stored, plan);
        // removed: neither placed nor prepared, whether the plan has paths or patterns for it
        for base in [
            ShardingPlan::new().param("**.up.*", [("tp", Shard(0))]).output("blocks.*", [("tp", Shard(1))]),
            (0..4).fold(ShardingPlan::new(), |plan, i| {
                let plan = plan.param(&format!("blocks.{i}.up.weight"), [("tp", Shard(0))]);
                plan.output(&format!("blocks.{i}"), [("tp", Shard(1))])
            }),
        ] {
            let model = new()?;
            shard_module(&model, mesh, &base.remove("blocks.0.**"))?;
            assert_eq!(model.placements("blocks.0.up.weight"), [Replicate, Replicate]);
            assert_eq!(model.placements("blocks.1.up.weight"), [Replicate, Shard(0)]);
            let x = DTensor::ones((4, 8), DType::F32, mesh, [Shard(0), Replicate])?;
            assert_eq!(model.blocks[0].forward(&x)?.placements(), [Shard(0), Replicate]);
            assert_eq!(model.blocks[1].forward(&x)?.placements(), [Shard(0), Shard(1)]);
        }
        // entries added after a removal apply
        let model = new()?;
        let plan = ShardingPlan::new().param("**.weight", [("tp", Shard(0))]).remove("head.weight");
        shard_module(&model, mesh, &plan.param("head.weight", [("tp", Shard(1))]))?;
        assert_eq!(model.placements("head.weight"), [Replicate, Shard(1)]);
        Ok(())
    });
}

#[test]
fn patterns_that_match_nothing_or_do_not_parse_are_errors() {
    on_two_axes(|mesh| {
        let new = ShardingPlan::new;
        for (plan, parts) in [
            (new().remove("blocks.9.**"), ["`blocks.9.**`", "fits no parameter or module"]),
            (new().replace("**.upp.weight", [("tp", Shard(0))]), ["`**.upp.weight`", "fits no parameter"]),
            (new().param("blocks.*.[uv.weight", [("tp", Shard(0))]), ["`[` that is not closed", "close it"]),
            (new().param("blocks.{0,1.up.weight", [("tp", Shard(0))]), ["`{` that is not closed", "close it"]),
            (new().param("blocks.[8-9].up.weight", [("tp", Shard(0))]), ["`blocks.[8-9].up.weight`", "fits no"]),
        ] {
            let error = refused(mesh, &plan)?;
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        Ok(())
    });
}

#[test]
fn a_parameter_built_under_another_name_than_its_field_is_an_error() {
    on_two_axes(|mesh| {
        let plan = ShardingPlan::new().param("down.weight", [("tp", Shard(1))]);
        let typo = |builder: &Builder| -> Result<Mlp> {
            let mut mlp = Mlp::new(builder, 8, 16, Activation::Relu)?;
            mlp.down = Linear::new(&builder.child("dwon"), 16, 8)?;
            Ok(mlp)
        };
        let error = plan.build(mesh, typo).err().expect("refused").to_string();
        for part in ["`dwon.weight`", "did you mean `down.weight`", "Builder::child"] {
            assert!(error.contains(part), "{part} missing in {error}");
        }
        plan.build(mesh, |builder| Mlp::new(builder, 8, 16, Activation::Relu))?;
        // below the root, too
        let builder = Builder::new(mesh).child("decoder");
        builder.check(&Mlp::new(&builder, 8, 16, Activation::Relu)?)?;
        assert!(builder.check(&Linear::new(&builder, 8, 16)?).unwrap_err().to_string().contains("`decoder.up.weight`"));
        Ok(())
    });
}
