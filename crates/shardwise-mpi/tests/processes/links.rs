//! The default links of the engine, configured links and measured links.

use shardwise::World;
use shardwise::mesh::{Link, Network};
use shardwise_mpi::Settings;

use crate::suites::on_all;

fn settings() -> Settings {
    Settings::from_env().expect("good settings")
}

/// Checks that all ranks have the same links.
fn agree(world: &World, what: &'static str, network: &Network) -> shardwise::Result<()> {
    let numbers = |link: Link| [link.latency_us.to_bits(), link.gb_per_s.to_bits()];
    world.agree(what, &[numbers(network.intra_host()), numbers(network.inter_host())].concat())
}

/// On one host every mesh axis has the engine's link inside a host, which differs from that of threads.
pub(crate) fn of_one_host() {
    on_all(&settings(), |world| {
        let stated = world.network().clone();
        assert!(stated.intra_host() != Link::THREADS && stated.inter_host() != stated.intra_host(), "{stated}");
        let mesh = world.mesh([("dp", 1), ("tp", world.size())])?;
        assert_eq!((mesh.link("dp")?, mesh.link("tp")?), (stated.intra_host(), stated.intra_host()));
        agree(&world, "stated links", &stated)?;
        let measured = world.measure_links()?;
        agree(&world, "measured links", &measured)?;
        assert_eq!(measured.intra_host() != stated.intra_host(), world.size() > 1, "{measured}");
        let mesh = world.with_network(measured.clone())?.mesh([("tp", world.size())])?;
        assert_eq!(mesh.link("tp")?, measured.intra_host());
        println!("measured: {measured}");
        Ok(())
    });
}

/// Links in the settings replace the defaults of the engine.
pub(crate) fn configured() {
    let (inside, across) = (Link { latency_us: 1.0, gb_per_s: 6.0 }, Link { latency_us: 3.0, gb_per_s: 25.0 });
    on_all(&settings().links(inside, across), move |world| {
        assert_eq!((world.network().intra_host(), world.network().inter_host()), (inside, across));
        assert_eq!(world.mesh([("tp", 2)])?.link("tp")?, inside);
        Ok(())
    });
}

/// Two ranks on each of two hosts, numbered host by host.
pub(crate) fn of_two_hosts() {
    on_all(&settings(), |world| {
        let stated = world.network().clone();
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        assert_eq!((mesh.link("dp")?, mesh.link("tp")?), (stated.inter_host(), stated.intra_host()));
        let measured = world.measure_links()?;
        agree(&world, "measured links", &measured)?;
        assert!(
            measured.intra_host() != stated.intra_host() && measured.inter_host() != stated.inter_host(),
            "{measured}"
        );
        println!("measured: {measured}");
        Ok(())
    });
}
