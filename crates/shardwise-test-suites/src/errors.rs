//! Programs that must fail with the same error on all ranks.

use std::time::Duration;

use shardwise::ThreadWorld;
use shardwise::prelude::*;

/// Runs a program that must fail with the same error on all ranks, and returns the text of that error.
pub fn same_error_on_all_ranks(ranks: usize, program: impl Fn(World) -> Result<()> + Send + Sync + 'static) -> String {
    let world = ThreadWorld::new(ranks).unwrap().deadline(Duration::from_secs(20));
    // The error is the rank's result, so that no rank ends the world before the rest have their errors.
    let error = move |world: World| Ok(program(world).expect_err("the program must fail").to_string());
    let texts = world.run(error).unwrap();
    assert!(texts.iter().all(|text| text == &texts[0]), "{texts:#?}");
    texts[0].clone()
}
