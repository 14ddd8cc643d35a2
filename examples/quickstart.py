"""Books each payment once and in its account's order, however often it comes and work is killed."""

import sqlite3

from procession import App, Context

app = App("bank", store="sqlite:///bank.db")


@app.consumer("payments", name="ledger", session="account")
def book(payment: dict, ctx: Context) -> None:
    booked = "UPDATE accounts SET pence = pence + :pence, last = :id WHERE name = :account"
    ctx.write(booked, payment)


if __name__ == "__main__":
    with sqlite3.connect("bank.db") as bank:
        bank.execute("CREATE TABLE IF NOT EXISTS accounts (name PRIMARY KEY, pence INT, last INT)")
        names = [(f"a{number}",) for number in range(100)]
        bank.executemany("INSERT OR IGNORE INTO accounts VALUES (?, 0, 0)", names)
    payments = [{"id": n, "account": f"a{n % 100}", "pence": 5} for n in range(1, 100_001)]
    print(app.send_many("payments", payments, identify=lambda payment: str(payment["id"])), "sent")
