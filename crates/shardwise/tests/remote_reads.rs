//! Reads of other ranks' shards on thread worlds.

#[path = "suites/remote_reads.rs"]
mod remote_reads;
#[path = "suites/scratch.rs"]
mod scratch;

use shardwise::prelude::*;

#[test]
fn shards_are_read_without_calls_of_their_owners() {
    for ranks in 1..=4 {
        let scratch = scratch::Scratch::new(&format!("remote-reads-{ranks}"));
        let path = scratch.0.clone();
        let run = move |world: World| remote_reads::run(&world, &path);
        let read = ThreadWorld::new(ranks).unwrap().run(run).unwrap();
        // Ranks hold 1, 2, 0 and 1 shards; each rank reads all shards of other ranks, twice per case.
        let held = &[1, 2, 0, 1][..ranks];
        let expected: Vec<usize> = held.iter().map(|own| 2 * 5 * (held.iter().sum::<usize>() - own)).collect();
        assert_eq!(read, expected);
    }
}
