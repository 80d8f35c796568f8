//! Links (bandwidth and latency of a mesh axis) come from the engine, from the program or from a measurement, and planners
//! use them.

use std::sync::Arc;

use candle_core::Tensor;
use shardwise::comm::{Call, Communicator, ExposedTensors};
use shardwise::error::Site;
use shardwise::mesh::{Link, Network};
use shardwise::nn::{Activation, Builder, Forward, Mlp};
use shardwise::plan::{AutoPlanner, ShardingPlan};
use shardwise::prelude::*;
use shardwise::redistribute::explain;
use shardwise::{DryWorld, Layout, TensorMeta, ThreadWorld, World};

const CABLE: Link = Link { latency_us: 30.0, gb_per_s: 0.5 };

/// Four ranks on two hosts; on a mesh `x=2,y=2` the axis that stays inside a host is `y` or `x`.
fn two_hosts(inside: &str) -> Network {
    let hosts = if inside == "y" { [0, 0, 1, 1] } else { [0, 1, 0, 1] };
    Network::of_hosts(hosts, Link::THREADS, CABLE).unwrap()
}

/// An engine of another crate: one rank of four, with its own network. Nothing is communicated.
struct Planned(Network);

impl Communicator for Planned {
    fn rank(&self) -> usize {
        0
    }
    fn ranks(&self) -> &[usize] {
        &[0, 1, 2, 3]
    }
    fn run(&self, _: &Call, _: &[Tensor], _: Site) -> Result<Vec<Tensor>> {
        unreachable!("planning communicates nothing")
    }
    fn send(&self, _: &Tensor, _: usize, _: u64, _: Site) -> Result<()> {
        unreachable!("planning communicates nothing")
    }
    fn recv(&self, _: &TensorMeta, _: usize, _: u64, _: Site) -> Result<Tensor> {
        unreachable!("planning communicates nothing")
    }
    fn subgroup(&self, _: &[usize]) -> Result<Arc<dyn Communicator>> {
        unreachable!("planning communicates nothing")
    }
    fn expose(&self, _: &[Tensor], _: Site) -> Result<Box<dyn ExposedTensors>> {
        unreachable!("planning communicates nothing")
    }
    fn abort(&self, _: &str) {}
    fn network(&self) -> Network {
        self.0.clone()
    }
}

#[test]
fn a_mesh_has_the_links_of_the_engine_until_the_program_gives_others() {
    let world = World::new(Arc::new(Planned(two_hosts("y"))));
    let mesh = world.mesh([("x", 2), ("y", 2)]).unwrap();
    assert_eq!((mesh.link("x").unwrap(), mesh.link("y").unwrap()), (CABLE, Link::THREADS));
    // a submesh inside one host has its fast link, whatever axis it was split off
    let line = world.mesh([("all", 4)]).unwrap();
    assert_eq!(line.link("all").unwrap(), CABLE);
    let split = line.unflatten("all", [("host", 2), ("rank", 2)]).unwrap();
    assert_eq!((split.link("host").unwrap(), split.link("rank").unwrap()), (CABLE, Link::THREADS));
    assert_eq!(mesh.slice(["y"]).unwrap().link("y").unwrap(), Link::THREADS);
    assert_eq!(mesh.flatten(["x", "y"], "all").unwrap().link("all").unwrap(), CABLE);
    // links that the program gave stay with the axes
    let wire = Link { latency_us: 5.0, gb_per_s: 3.0 };
    let given = line.with_links(&[wire]).unwrap().unflatten("all", [("host", 2), ("rank", 2)]).unwrap();
    assert_eq!((given.link("host").unwrap(), given.link("rank").unwrap()), (wire, wire));
    let other = world.with_network(Network::one_host(wire).unwrap()).unwrap();
    assert_eq!(other.mesh([("x", 2), ("y", 2)]).unwrap().link("x").unwrap(), wire);
    assert_eq!((world.network(), other.network().intra_host()), (&two_hosts("y"), wire));
    // a network that lacks ranks
    let short = Network::of_hosts([0, 1], Link::THREADS, CABLE).unwrap();
    let message = world.with_network(short.clone()).unwrap_err().to_string();
    assert!(message.contains("hosts of 2 rank(s)") && message.contains("rank 3"), "{message}");
    assert!(DryWorld::new(4).unwrap().network(short.clone()).is_err());
    let lacking = World::new(Arc::new(Planned(short)));
    assert!(lacking.mesh([("x", 2)]).is_ok() && lacking.mesh([("x", 4)]).is_err());
}

#[test]
fn a_redistribution_reduces_along_the_fast_axis_before_it_uses_the_slow_one() {
    let first_step = |inside: &str| {
        let world = World::new(Arc::new(Planned(two_hosts(inside))));
        let mesh = world.mesh([("x", 2), ("y", 2)]).unwrap();
        let layout = |text: &str| Layout::new(mesh.mesh(), (512, 512), Placement::parse_list(text).unwrap()).unwrap();
        let (from, to) = (layout("P(sum),P(sum)"), layout("S(0),S(1)"));
        let plan = explain(&mesh, &from, &to, DType::F32).unwrap().chosen;
        plan.steps()[0].to_string()
    };
    assert!(first_step("y").starts_with("reduce_scatter(sum) over y"), "{}", first_step("y"));
    assert!(first_step("x").starts_with("reduce_scatter(sum) over x"), "{}", first_step("x"));
}

#[test]
fn the_search_shards_layers_along_the_axis_that_stays_inside_a_host() {
    let make = |builder: &Builder| Mlp::new(builder, 256, 1024, Activation::Gelu);
    let step = move |plan: &ShardingPlan, mesh: &DeviceMesh| {
        let mlp = plan.build(mesh, make)?;
        let x = DTensor::zeros((512, 256), DType::F32, mesh, [Replicate, Replicate])?;
        mlp.forward(&x)?.square()?.sum_all()?.backward()?.in_param_layout()?;
        Ok(())
    };
    let found = |inside: &str| {
        let dry = DryWorld::new(4).unwrap().network(two_hosts(inside)).unwrap();
        let search = dry.run(|world| {
            let mesh = world.mesh([("x", 2), ("y", 2)])?;
            AutoPlanner::new(step).flops_per_s(1e12).search(&make(&Builder::new(&mesh))?, &mesh)
        });
        search.unwrap().value.plan.to_string()
    };
    let (along_y, along_x) = (found("y"), found("x"));
    assert!(along_y.contains("y: S(") && !along_y.contains("x: S("), "{along_y}");
    assert!(along_x.contains("x: S(") && !along_x.contains("y: S("), "{along_x}");
}

#[test]
fn threads_measure_their_links_once_and_all_ranks_get_the_same() {
    let all = ThreadWorld::new(4).unwrap().run(|world| {
        let network = world.measure_links()?;
        let calls = world.trace().report().0.iter().map(|(operator, _, total)| (*operator, total.calls)).collect();
        let again = world.measure_links()?;
        assert_eq!(again, network);
        let calls_after: Vec<_> = world.trace().report().0.iter().map(|(o, _, total)| (*o, total.calls)).collect();
        let calls: Vec<(&str, usize)> = calls;
        assert_eq!(calls, calls_after);
        assert!(calls.iter().all(|(operator, _)| *operator == "measure_links") && !calls.is_empty());
        let mesh = world.with_network(network.clone())?.mesh([("x", 2), ("y", 2)])?;
        assert_eq!((mesh.link("x")?, mesh.link("y")?), (network.intra_host(), network.intra_host()));
        Ok(network)
    });
    let all = all.unwrap();
    assert!(all.iter().all(|network| *network == all[0]), "{all:?}");
    let Link { latency_us, gb_per_s } = all[0].intra_host();
    assert!(latency_us > 0.0 && gb_per_s > 0.0 && all[0].intra_host() != Link::THREADS, "{}", all[0]);
    assert_eq!(all[0].inter_host(), all[0].intra_host());
}

#[test]
fn links_inside_and_across_hosts_are_measured_separately() {
    // five ranks on three hosts: the last host has one rank, the second row of ranks is one shorter
    let hosts = Network::of_hosts([0, 0, 1, 1, 2], Link::THREADS, CABLE).unwrap();
    let all = ThreadWorld::new(5).unwrap().run(move |world| {
        let world = world.with_network(hosts.clone())?;
        let measured = world.measure_links()?;
        let groups: std::collections::BTreeSet<Vec<usize>> =
            world.trace().records().iter().map(|r| r.group.to_vec()).collect();
        let found = |ranks: &[usize]| groups.contains(ranks);
        match world.rank() {
            1 => assert!(found(&[0, 1]) && found(&[1, 3])),
            4 => assert!(found(&[0, 2, 4]) && groups.len() == 2),
            _ => {}
        }
        Ok(measured)
    });
    let all = all.unwrap();
    assert!(all.iter().all(|network| *network == all[0]), "{all:?}");
    let (inside, across) = (all[0].intra_host(), all[0].inter_host());
    assert!(inside != across && inside != Link::THREADS && across != CABLE, "{}", all[0]);
    assert_eq!((all[0].host_of(1).unwrap(), all[0].host_of(4).unwrap()), (0, 2));
    // without anything to measure, the engine's figures stay
    let one_each = Network::of_hosts([0, 1], CABLE, CABLE).unwrap();
    let measured = shardwise::launch(2, move |world| world.with_network(one_each.clone())?.measure_links()).unwrap();
    assert!(measured.intra_host() == CABLE && measured.inter_host() != CABLE, "{measured}");
    let dry = DryWorld::new(4).unwrap().network(two_hosts("x")).unwrap();
    assert_eq!(dry.run(|world| world.measure_links()).unwrap().value, two_hosts("x"));
}
