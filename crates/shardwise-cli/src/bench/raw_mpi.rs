//! Plain MPI calls on allocated memory, with which our collectives are compared.

use shardwise::error::ErrorKind;
use std::cell::RefCell;
use std::ffi::c_int;

use mpi::ffi;
use shardwise::{Result, World};

use super::case::{COLUMNS, Collective, even};

/// A prepared MPI call on `f32` matrices.
pub(super) struct RawMpiCall {
    collective: Collective,
    memory: RefCell<CallBuffers>,
    /// Elements of the full matrix.
    count: c_int,
    /// Elements of every rank's rows.
    counts: Vec<c_int>,
    starts: Vec<c_int>,
    exchange: ColumnExchange,
    me: usize,
}

struct CallBuffers {
    from: Vec<f32>,
    to: Vec<f32>,
}

/// Arguments of `MPI_Alltoallw` that exchange a row-sharded matrix for a column-sharded one without packing: strided data types.
struct ColumnExchange {
    ones: Vec<c_int>,
    /// In bytes.
    send_starts: Vec<c_int>,
    send_types: Vec<ffi::MPI_Datatype>,
    receive_starts: Vec<c_int>,
    receive_counts: Vec<c_int>,
    receive_types: Vec<ffi::MPI_Datatype>,
}

impl RawMpiCall {
    pub(super) fn new(world: &World, collective: Collective, bytes: usize) -> Self {
        let (n, me, rows) = (world.size(), world.rank(), bytes / 4 / COLUMNS);
        let (row_sizes, column_sizes) = (even(rows, n), even(COLUMNS, n));
        let int = |n: usize| n as c_int;
        let starts = |sizes: &[usize], unit: usize| -> Vec<c_int> {
            (0..n).map(|r| int(sizes[..r].iter().sum::<usize>() * unit)).collect()
        };
        let mine = row_sizes[me];
        // SAFETY: constants of the library, and types that are committed before they are used.
        let (send_types, float) = unsafe {
            let float = ffi::RSMPI_FLOAT;
            let vector = |&columns: &usize| {
                let mut datatype = ffi::RSMPI_DATATYPE_NULL;
                ffi::MPI_Type_vector(int(mine), int(columns), int(COLUMNS), float, &raw mut datatype);
                ffi::MPI_Type_commit(&raw mut datatype);
                datatype
            };
            (column_sizes.iter().map(vector).collect(), float)
        };
        RawMpiCall {
            collective,
            memory: RefCell::new(CallBuffers { from: vec![1.0; rows * COLUMNS], to: vec![0.0; rows * COLUMNS] }),
            count: int(rows * COLUMNS),
            counts: row_sizes.iter().map(|s| int(s * COLUMNS)).collect(),
            starts: starts(&row_sizes, COLUMNS),
            exchange: ColumnExchange {
                ones: vec![1; n],
                send_starts: starts(&column_sizes, 4),
                send_types,
                receive_starts: starts(&row_sizes, column_sizes[me] * 4),
                receive_counts: row_sizes.iter().map(|s| int(s * column_sizes[me])).collect(),
                receive_types: vec![float; n],
            },
            me,
        }
    }

    pub(super) fn call(&self) -> Result<()> {
        let CallBuffers { from, to } = &mut *self.memory.borrow_mut();
        let (from, to) = (from.as_mut_ptr().cast(), to.as_mut_ptr().cast());
        let (counts, starts, mine) = (self.counts.as_ptr(), self.starts.as_ptr(), self.counts[self.me]);
        let even = self.counts.iter().all(|&n| n == mine);
        // SAFETY: both sides are as large as the full matrix.
        let code = unsafe {
            let (float, sum, world) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, ffi::RSMPI_COMM_WORLD);
            match self.collective {
                Collective::Barrier => ffi::MPI_Barrier(world),
                Collective::Broadcast => ffi::MPI_Bcast(from, self.count, float, 0, world),
                Collective::AllGather if even => ffi::MPI_Allgather(from, mine, float, to, mine, float, world),
                Collective::AllGather => ffi::MPI_Allgatherv(from, mine, float, to, counts, starts, float, world),
                Collective::AllReduce => ffi::MPI_Allreduce(from, to, self.count, float, sum, world),
                Collective::ReduceScatter => ffi::MPI_Reduce_scatter(from, to, counts, float, sum, world),
                Collective::ExchangeDims => {
                    let ColumnExchange { ones, send_starts, send_types, receive_starts, receive_counts, receive_types } =
                        &self.exchange;
                    ffi::MPI_Alltoallw(
                        from,
                        ones.as_ptr(),
                        send_starts.as_ptr(),
                        send_types.as_ptr(),
                        to,
                        receive_counts.as_ptr(),
                        receive_starts.as_ptr(),
                        receive_types.as_ptr(),
                        world,
                    )
                }
            }
        };
        if code == ffi::MPI_SUCCESS as c_int {
            return Ok(());
        }
        Err(ErrorKind::Launch.error(
            "MPI call",
            format!("code {code}"),
            "success",
            "look at what the MPI library printed",
        ))
    }
}

impl Drop for RawMpiCall {
    fn drop(&mut self) {
        for datatype in &mut self.exchange.send_types {
            // SAFETY: committed in `new`, and no call that uses it is in progress.
            unsafe { ffi::MPI_Type_free(datatype) };
        }
    }
}
