//! Programs that must end in an error on every rank, at once and without memory for what they ask for.

use std::time::{Duration, Instant};

use shardwise::prelude::*;

/// Longer than any rejection takes on a busy machine, and far shorter than filling the requested tensor.
pub const AT_ONCE: Duration = Duration::from_secs(20);

/// More elements than any machine has memory for.
pub const VAST: usize = 1_000_000_000_000;

/// Runs a program that must fail on both ranks, and returns the two error texts.
///
/// # Panics
/// If it does not fail, or not at once, or with an error that does not say what was needed.
pub fn refused(program: impl Fn(&DeviceMesh) -> Result<DTensor> + Send + Sync + 'static) -> Vec<String> {
    let begun = Instant::now();
    let run = move |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let error = program(&mesh).expect_err("too large").to_string();
        // Every rank is still there, and the world still works.
        world.barrier()?;
        Ok(error)
    };
    let texts = ThreadWorld::new(2).unwrap().deadline(AT_ONCE).run(run).unwrap();
    assert!(begun.elapsed() < AT_ONCE, "{:?}: {texts:?}", begun.elapsed());
    assert!(texts.iter().all(|text| text.starts_with("invalid ") && text.contains("needed")), "{texts:?}");
    texts
}
