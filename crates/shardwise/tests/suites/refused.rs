//! Programs that all ranks refuse alike.

use std::time::Duration;

use shardwise::ThreadWorld;
use shardwise::prelude::*;

/// Runs a program that must fail, and returns the error, which must be one and the same on all ranks.
pub(crate) fn refused(ranks: usize, program: impl Fn(World) -> Result<()> + Send + Sync + 'static) -> String {
    let world = ThreadWorld::new(ranks).unwrap().deadline(Duration::from_secs(20));
    // The error is the result, so that no rank fails before the others have their own.
    let told = move |world: World| Ok(program(world).expect_err("must be refused").to_string());
    let texts = world.run(told).unwrap();
    assert!(texts.iter().all(|text| text == &texts[0]), "{texts:#?}");
    texts[0].clone()
}
