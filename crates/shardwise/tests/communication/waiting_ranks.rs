//! More ranks than cores: waiting ranks sleep instead of spinning, and the rest make progress.

use std::time::{Duration, Instant};

use shardwise::ThreadWorld;
use shardwise_test_suites::own_process;

#[test]
#[cfg(target_os = "linux")]
fn eight_ranks_make_progress_and_waiting_ranks_use_no_processor_time() {
    // Other tests would use the time that this one measures.
    if !own_process::is_alone(module_path!(), "eight_ranks_make_progress_and_waiting_ranks_use_no_processor_time") {
        return;
    }
    const WAIT: Duration = Duration::from_millis(1500);
    let measured = ThreadWorld::new(8).unwrap().run(|world| {
        for _ in 0..2000 {
            world.barrier()?;
        }
        let (start, used) = (Instant::now(), processor_time());
        if world.rank() == 0 {
            std::thread::sleep(WAIT);
        }
        world.barrier()?;
        Ok((start.elapsed(), processor_time() - used))
    });
    for (elapsed, used) in measured.unwrap() {
        assert!(elapsed >= WAIT * 9 / 10, "{elapsed:?}");
        assert!(used < WAIT / 10, "seven waiting ranks used {used:?} of processor time in {elapsed:?}");
    }
}

/// User and system time of this process so far.
#[cfg(target_os = "linux")]
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    let ticks: u64 = after_name.split_whitespace().skip(11).take(2).map(|n| n.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10) // 100 ticks per second on every Linux
}
