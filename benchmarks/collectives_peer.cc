// Measures an allreduce and an allgather with MPI, without Horovod.
//
//   mpirun -np 2 collectives_peer DENSE_BYTES MESSAGE_BYTES LOOPS ROUNDS
//
// Rank 0 prints the median milliseconds of all rounds as JSON.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

double MedianOf(int rounds, int loops, const std::function<void()>& call) {
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    for (int i = 0; i < loops; ++i) call();
    times.push_back((MPI_Wtime() - start) * 1e3 / loops);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 5) return 2;
  const int dense = std::atoi(argv[1]) / 4, message = std::atoi(argv[2]);
  const int loops = std::atoi(argv[3]), rounds = std::atoi(argv[4]);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  std::vector<float> own(dense, 1.f), sum(dense);
  std::vector<char> sent(message, 1), all(static_cast<size_t>(message) * ranks);
  const double reduced = MedianOf(rounds, loops, [&] {
    MPI_Allreduce(own.data(), sum.data(), dense, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  });
  const double gathered = MedianOf(rounds, loops, [&] {
    MPI_Allgather(sent.data(), message, MPI_CHAR, all.data(), message, MPI_CHAR, MPI_COMM_WORLD);
  });
  if (rank == 0) std::printf("{\"sum\": %.6f, \"gather\": %.6f}\n", reduced, gathered);
  MPI_Finalize();
  return 0;
}
